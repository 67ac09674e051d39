"""The README's page on extending the package, followed to the letter on a copy of it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_following_the_page_on_losses_and_networks_works(tmp_path):
    """Red where a snippet no longer fits the code it goes into, or needs a step that is not told."""
    shutil.copytree(ROOT / "pqn_eqx", tmp_path / "pqn_eqx", ignore=shutil.ignore_patterns("__pycache__"))
    snippets = re.findall(r"<!-- tested: (\S+) -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [file for file, _ in snippets] == ["losses.py", "networks/encoders.py"]
    for file, code in snippets:
        with (tmp_path / "pqn_eqx" / file).open("a") as stream:
            stream.write("\n\n" + code)
    network = tmp_path / "pqn_eqx" / "networks" / "q_network.py"
    text = network.read_text()
    text = text.replace("encoders import MLPConfig", "encoders import FourierConfig, MLPConfig")
    text = re.sub(r"^EncoderConfig = (.*)$", r"EncoderConfig = \1 | FourierConfig", text, flags=re.MULTILINE)
    network.write_text(text)

    def command(*arguments):
        subprocess.run(
            [sys.executable, "-m", "pqn_eqx.train", *arguments],
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )

    flags = ["--loss.scale", "0.5", "--network.encoder.num-frequencies", "16", "--total-timesteps", "2048"]
    command("loss:log-cosh", "network.encoder:fourier", *flags, "--run-dir", "run", "--eval.max-steps", "20")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["loss"] == {"type": "log-cosh", "scale": 0.5}
    assert config["network"]["encoder"]["type"] == "fourier"
    command("--config", "run/config.json", "--run-dir", "again", "--seed", "1")
