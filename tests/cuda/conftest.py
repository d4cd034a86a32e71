"""Tests of the CUDA kernels import the emulator and each other's mutations by plain name."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "emulator"), str(HERE)]
