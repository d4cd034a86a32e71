"""The scripts in `examples` run as they stand, are short, and print what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PRINTED = {
    "prune_cnn.py": [
        r"accuracy: 0\.9\d\d dense, 0\.[89]\d\d pruned",
        r"the pruned model is \d+\.\d\d times as fast as dense torch",
    ],
    "prune_text_encoder.py": [
        r"1\.qkv +\d+% of the weights are zero",
        r"the pruned model is \d+\.\d\d times as fast as dense torch",
    ],
    "cost_model.py": [
        r"\d+ measured points",
        r"median error \d+\.\d%; the 90% interval holds \d+% of unseen shapes",
        r"1024x1536 on 128 tokens, 75% zeros: \d+ µs \(\d+-\d+\)",
        r"cannot predict linear 1024x1536x100000",
    ],
}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", list(PRINTED))
def test_an_example_runs_in_any_folder_and_prints_its_result(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / name
    assert len(path.read_text().splitlines()) < 60
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for pattern in PRINTED[name]:
        assert re.search(pattern, done.stdout), done.stdout
    assert list(tmp_path.iterdir()) == []
