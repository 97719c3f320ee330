"""What deploy/ ships: fields that the platforms know, configurations that resolve, and as many devices as they need.

The schema of the RayJob is written down here from KubeRay's API (``ray.io/v1``, version 1.5), as far as a job of ours goes; a field that it does not have is an
error. The same for Anyscale's JobConfig and ComputeConfig (SDK 0.26).
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from everstep.config import derive
from everstep.config.load import load_config
from everstep.config.schema import Config

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def obj(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


TEXT, NUMBER, BOOL, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "integer"}
QUANTITY = {"type": ["string", "number"], "pattern": r"^[0-9.]+(m|[kMGTPE]i?)?$"}


def maps(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value}


def lists(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


CONTAINER = obj(
    "name image", name=TEXT, image=TEXT, imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]}, command=lists(TEXT), args=lists(TEXT),
    env=lists(obj("name", name=TEXT, value=TEXT, valueFrom={"type": "object"})),
    envFrom=lists(obj(prefix=TEXT, secretRef=obj(name=TEXT, optional=BOOL), configMapRef=obj(name=TEXT, optional=BOOL))),
    ports=lists(obj("containerPort", containerPort=INTEGER, name=TEXT, protocol=TEXT)),
    resources=obj(requests=maps(QUANTITY), limits=maps(QUANTITY)), volumeMounts=lists(obj("name mountPath", name=TEXT, mountPath=TEXT, readOnly=BOOL)),
)  # fmt: skip
POD = obj(
    "spec", metadata={"type": "object"},
    spec=obj(
        "containers", containers=lists(CONTAINER), initContainers=lists(CONTAINER), serviceAccountName=TEXT, nodeSelector=maps(TEXT),
        tolerations={"type": "array"}, affinity={"type": "object"}, terminationGracePeriodSeconds=INTEGER, hostNetwork=BOOL,
        volumes=lists(obj("name", name=TEXT, persistentVolumeClaim=obj("claimName", claimName=TEXT, readOnly=BOOL),
                          emptyDir=obj(medium=TEXT, sizeLimit=QUANTITY), hostPath={"type": "object"}, secret={"type": "object"})),
    ),
)  # fmt: skip
RAYJOB = obj(
    "apiVersion kind metadata spec", apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"},
    metadata=obj("name", name=TEXT, namespace=TEXT, labels=maps(TEXT), annotations=maps(TEXT)),
    spec=obj(
        "entrypoint rayClusterSpec", activeDeadlineSeconds=INTEGER, backoffLimit=INTEGER, entrypoint=TEXT, entrypointNumCpus=NUMBER, entrypointNumGpus=NUMBER,
        entrypointResources=TEXT, jobId=TEXT, runtimeEnvYAML=TEXT, shutdownAfterJobFinishes=BOOL, suspend=BOOL, ttlSecondsAfterFinished=INTEGER,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]}, submitterPodTemplate=POD,
        rayClusterSpec=obj(
            "headGroupSpec", rayVersion=TEXT, enableInTreeAutoscaling=BOOL, autoscalerOptions={"type": "object"},
            headGroupSpec=obj("template", rayStartParams=maps(TEXT), serviceType=TEXT, template=POD),
            workerGroupSpecs=lists(obj("groupName maxReplicas minReplicas template", groupName=TEXT, replicas=INTEGER, minReplicas=INTEGER, maxReplicas=INTEGER,
                                       numOfHosts=INTEGER, idleTimeoutSeconds=INTEGER, rayStartParams=maps(TEXT), template=POD)),
        ),
    ),
)  # fmt: skip
NODES = dict(instance_type=TEXT, resources=maps(NUMBER), required_resources=maps(NUMBER), labels=maps(TEXT), advanced_instance_config={"type": "object"}, flags={"type": "object"})
JOB = obj(
    "name entrypoint", name=TEXT, image_uri=TEXT, containerfile=TEXT, working_dir=TEXT, excludes=lists(TEXT), requirements=lists(TEXT), env_vars=maps(TEXT),
    cloud=TEXT, project=TEXT, entrypoint=TEXT, max_retries=INTEGER, timeout_s=INTEGER, tags=maps(TEXT),
    compute_config=obj(
        head_node=obj("instance_type", **NODES), min_resources=maps(NUMBER), max_resources=maps(NUMBER), zones=lists(TEXT), cloud=TEXT,
        worker_nodes=lists(obj("instance_type", **NODES, name=TEXT, min_nodes=INTEGER, max_nodes=INTEGER, market_type={"enum": ["ON_DEMAND", "SPOT", "PREFER_SPOT"]})),
    ),
)  # fmt: skip


def of_command(command: str) -> Config:
    """The configuration of `everstep train CONFIG KEY=VALUE ...`."""
    program, verb, path, *overrides = shlex.split(command)
    assert (program, verb) == ("everstep", "train")
    return load_config(ROOT / path, overrides)


def devices(config: Config) -> int:
    return derive.layout(config).devices + config.rollout.engines


def test_the_rayjob() -> None:
    job = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())
    jsonschema.validate(job, RAYJOB)
    config, cluster = of_command(job["spec"]["entrypoint"]), job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    offered = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert offered == devices(config) and workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    import ray

    assert cluster["rayVersion"] == ray.__version__
    # everybody sees the run's folder
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for pod in pods:
        mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted.items() <= {"/runs": "runs", "/dev/shm": "shm"}.items() and {v["name"] for v in pod["volumes"]} == {"runs", "shm"}
    assert config.run_dir.startswith("/runs/") and config.ray.address and config.resume == "auto"
    broken = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())
    broken["spec"]["rayClusterSpec"]["headGroupSpec"]["tempalte"] = {}
    with pytest.raises(jsonschema.ValidationError, match="tempalte"):
        jsonschema.validate(broken, RAYJOB)


def test_the_anyscale_job() -> None:
    job = yaml.safe_load((DEPLOY / "anyscale" / "job.yaml").read_text())
    jsonschema.validate(job, JOB)
    config, compute = of_command(job["entrypoint"]), job["compute_config"]
    (workers,) = compute["worker_nodes"]
    per_node = 4  # of a g6e.12xlarge
    assert workers["instance_type"] == "g6e.12xlarge" and workers["min_nodes"] * per_node == devices(config)
    assert compute["max_resources"]["GPU"] == workers["max_nodes"] * per_node and workers["max_nodes"] > workers["min_nodes"]
    assert (ROOT / job["containerfile"]).is_file() and config.ray.address == "auto"


@pytest.mark.parametrize("script", sorted((DEPLOY / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_the_slurm_scripts(script: Path) -> None:
    text = script.read_text()
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for promised in ("--no-kill", "--requeue", "--signal=B:TERM@", "--nodes=", "--gpus-per-node="):
        assert re.search(rf"^#SBATCH {re.escape(promised)}", text, re.M), promised
    said = re.search(r"^# +sbatch deploy/slurm/\S+ (.+)$", text, re.M)
    assert said
    config = of_command(f"everstep train {said[1]}")
    nodes, gpus = (int(re.search(rf"^#SBATCH --{name}=(\d+)", text, re.M)[1]) for name in ("nodes", "gpus-per-node"))  # type: ignore[index]
    if "launcher=local" in text:
        assert derive.layout(config).ranks_per_replica == gpus  # a replica on each node
        assert "export EVERSTEP_LIGHTHOUSE_TOKEN=" in text, "a lighthouse that others can reach starts with a secret only"
    else:
        assert nodes * gpus == devices(config)
    used = set(re.findall(r"everstep (\w+)", re.sub(r"^#.*$", "", text, flags=re.M)))
    assert used <= {"train", "lighthouse"} and "train" in used


def test_the_image_copies_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.M) for word in line.split()[:-1]]
    assert copied and all((ROOT / path).exists() for path in copied)
    extras = re.search(r"\.\[([\w,]+)\]", text)
    assert extras
    import tomllib

    assert set(extras[1].split(",")) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


_SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
flags = []
while words and words[0].startswith("-"):
    flags.append(words.pop(0))
    if flags[-1] == "-w":
        words.pop(0)
nodes = 1 if "--nodes=1" in flags else int(os.environ["SLURM_NNODES"])
tasks = [subprocess.Popen(words, env=os.environ | dict(SLURM_PROCID=str(i), SLURM_NODEID=str(i), SLURM_STEP_NUM_NODES=str(nodes))) for i in range(nodes)]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_script_of_launcher_local_trains(tmp_path: Path) -> None:
    """On this machine: srun starts every task here, the interface is the loopback; lighthouse, replicas, training and exit code are real."""
    import os
    import socket
    import sys

    bin_ = tmp_path / "bin"
    bin_.mkdir()
    programs = {
        "srun": _SRUN.replace("{python}", sys.executable),
        "scontrol": '#!/bin/sh\n[ "$1" = show ] && printf "a\\nb\\n" || echo "$@" >> "$REQUEUED"\n',
        "ip": '#!/bin/sh\necho "1: lo    inet 127.0.0.1/8 scope host lo"\n',
        "everstep": f'#!/bin/sh\nexec {sys.executable} -m everstep "$@"\n',
    }
    for name, text in programs.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {
        **os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "t", "SLURM_JOB_NODELIST": "a,b",
        "SLURM_GPUS_ON_NODE": "1", "RUN": str(tmp_path / "run"), "PORT": str(port), "DEVICE": "cpu", "IFNAME": "lo", "REQUEUED": str(tmp_path / "requeued"),
    }
    arguments = ["examples/sft_text.yaml", "sft.steps=12", "telemetry.progress=none", "telemetry.tensorboard=false", "checkpoint.hf=false"]
    done = subprocess.run(["bash", str(DEPLOY / "slurm" / "local.sbatch"), *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    from everstep.telemetry.history import check, worst

    assert not worst(check(tmp_path / "run")) and not (tmp_path / "requeued").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-000012").is_dir()
