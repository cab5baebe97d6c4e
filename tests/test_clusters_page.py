"""What docs/clusters.md tells schedulers to start is a command of jrec, and its numbers agree."""

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

from jrec.app.commands import train
from jrec.environment import CACHE_VARIABLE
from jrec.errors import ConfigError, LostProcessError

CLUSTERS = pathlib.Path(__file__).parent.parent / "examples" / "clusters"
JOBSET = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
SLURM = (CLUSTERS / "slurm.sh").read_text()


def options_of(words):
    """The parsed arguments of a ``jrec train`` command."""
    assert words[:2] == ["jrec", "train"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    train.add_arguments(parser)
    return parser.parse_args(words[2:])


def test_pods_are_the_processes_that_the_command_names():
    (job,) = JOBSET["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (line,) = container["args"]
    command = line.removeprefix("exec ").replace('"$JOB_COMPLETION_INDEX"', "1")
    options = options_of(shlex.split(command))
    assert options.resume
    assert options.processes == spec["parallelism"] == spec["completions"]
    assert options.process == 1
    assert spec["completionMode"] == "Indexed"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"mesh.devices={gpus * options.processes}" in command.split()


def test_the_coordinator_is_the_first_pod():
    name = JOBSET["metadata"]["name"]
    (job,) = JOBSET["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "JAX_COORDINATOR_ADDRESS"
    assert variable["value"].split(":")[0] == f"{name}-{job['name']}-0-0.{name}"


def test_the_batch_script_starts_jrec_and_requeues_what_can_go_on():
    subprocess.run(["bash", "-n", CLUSTERS / "slurm.sh"], check=True)
    (call,) = re.findall(r"^srun [^\n]*\n(?:  [^\n]*\n)+", SLURM, re.MULTILINE)
    words = shlex.split(call.replace("\\\n", " ").replace('"$SLURM_NTASKS"', "8").split("||")[0])
    options = options_of(words[words.index("jrec") :])
    assert options.resume
    assert options.distributed


def end_of(tmp_path, code, **environment):
    """Runs the batch script with a run that ends with this code; what Slurm is asked for, and what the script says."""
    for name, body in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    environment |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}
    script = ["bash", CLUSTERS / "slurm.sh"]
    done = subprocess.run(script, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == code
    asked = tmp_path / "asked"
    return asked.read_text() if asked.is_file() else "", done.stderr


LOST = LostProcessError.exit_code


@pytest.mark.parametrize("code", [0, 1, ConfigError.exit_code, 139, 143, 253])
def test_the_batch_script_does_not_requeue_what_would_end_so_again(code, tmp_path):
    assert end_of(tmp_path, code) == ("", "")


@pytest.mark.parametrize("code", [LOST, 130, 134, 137])
def test_the_batch_script_requeues_what_can_go_on_but_not_forever(code, tmp_path):
    assert end_of(tmp_path, code) == ("requeue 77\n", "")
    (tmp_path / "asked").unlink()
    assert end_of(tmp_path, code, SLURM_RESTART_COUNT="19") == ("requeue 77\n", "")
    (tmp_path / "asked").unlink()
    assert end_of(tmp_path, code, SLURM_RESTART_COUNT="20") == ("", "not requeued: restarted 20 times already\n")
    assert end_of(tmp_path, code, SLURM_RESTART_COUNT="3", JREC_MOST_RESTARTS="3")[0] == ""


def test_the_page_has_the_exit_codes():
    page = (CLUSTERS.parents[1] / "docs/clusters.md").read_text()
    assert f"| {LOST} | another process was killed" in page
    assert f"| 1, {ConfigError.exit_code} |" in page


def test_the_image_starts_the_command_that_pods_name():
    """Docker itself is not run: what the image is made of is checked."""
    text = (CLUSTERS / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert json.loads(entry) == ["jrec"]
    (extras,) = re.findall(r"'/src\[(.*)\]'", text)
    project = tomllib.loads((CLUSTERS.parents[1] / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert CACHE_VARIABLE in text
    (example,) = re.findall(r"^#\s+docker run .* jrec-train (.*)$", text, re.MULTILINE)
    options_of(["jrec", *shlex.split(example)])
    (job,) = JOBSET["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert "/jrec-train:" in container["image"]
