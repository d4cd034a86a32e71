"""What tests of sweeps that are cut off run in processes of their own: `latbench` as the command line has it, but a
point has a tenth of the time, and a layer a block of its own.

python short_sweep.py COMMAND ARGUMENTS
"""

from latbench.cli import main
from latbench.sweeping import settings
from latbench.sweeping.settings import SweepSettings

if __name__ == "__main__":
    settings.CPU_SETTINGS = SweepSettings(max_seconds=0.04, block_points=1)
    main.main()
