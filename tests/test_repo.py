"""The repository keeps its own word: examples load, commands named in the documents exist, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from everstep.config import load as config_load
from everstep.errors import EverstepError
from everstep.telemetry import events, metrics

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MAX_LINES = 600


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, comments removed."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.M))


def test_readme_commands_exist() -> None:
    targets, named = makefile_targets(), [words for page in PAGES for words in commands(page)]
    assert {"make", "everstep"} <= {words[0] for words in named}
    from typer.main import get_command

    from everstep.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    for words in named:
        match words:
            case ["make", target, *_]:
                assert target in targets, words
            case ["everstep", command, *arguments]:
                assert command in known, words
                for word in arguments[: arguments.index(">") if ">" in arguments else None]:  # what follows it is written, not read
                    if word.endswith(".yaml"):
                        assert (ROOT / word).is_file(), words


#: What a command of the documents may be refused for here, and the command then.
LACKING = {
    "vLLM is not installed here": "rollout.engine=vllm", "~/data/models/Qwen3-8B is not a directory here": "examples/grpo_qwen3_8b.yaml",
    "this machine has": "device=cuda", "is not installed": "examples/grpo_smollm2.yaml",
}  # fmt: skip


def test_the_commands_of_the_documents_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `everstep train CONFIG a.b=c`, and up, plan, chaos: what it asks for would be started."""
    from everstep.plan import make_plan

    monkeypatch.chdir(ROOT)
    lines = [words for page in PAGES for words in commands(page) if words[0] == "everstep" and words[1] in ("train", "plan", "up", "chaos")]
    assert {words[1] for words in lines} == {"train", "plan", "up", "chaos"}
    for _, _, path, *more in lines:
        overrides = [word for word in more if "=" in word and not word.startswith("--")]
        try:
            make_plan(config_load.load_config(path, overrides))
        except EverstepError as refused:
            if not any(said in str(refused) and of in [path, *overrides] for said, of in LACKING.items()):
                raise AssertionError(f"{path} {' '.join(overrides)}: {refused}") from refused


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_can_be_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `everstep plan` does it: resolved, cut into slots, model shape read, placed; no process is started."""
    monkeypatch.chdir(ROOT)
    # An example of a model that is not at hand says in its head with which overrides it is planned without.
    said = re.search(rf"^#\s+everstep plan examples/{re.escape(path.name)} (.+)$", path.read_text(), flags=re.M)
    config = config_load.load_config(path, said[1].split() if said else [])
    for needed in re.findall(r"(?:package:([a-z0-9_-]+)|(reasoning_gym):)", path.read_text()):
        module = "".join(needed).replace("-", "_")
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{path.name} needs {module}, which is not installed (extra smollm2)")
    from everstep.plan import make_plan

    plan = make_plan(config)
    assert plan is not None


def test_there_are_examples_of_all_recipes() -> None:
    assert {config_load.load_config(path).recipe for path in EXAMPLES} == {"sft", "grpo", "ppo", "dpo"}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).is_file(), f"{page.relative_to(ROOT)} links to {target}, which is not there"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, f"docs/README.md does not list {page.name}"


def test_no_module_is_too_long() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_metric_names_in_the_code_are_in_the_table() -> None:
    """A metric that is written rarely (a checkpoint, a death) must not be found wrong only when it is."""
    prefixes = "|".join(sorted(re.escape(prefix) for prefix in metrics.OWN_PREFIXES))
    for path in (path for path in SOURCES if path.name != "metrics.py"):
        for name in re.findall(rf'"((?:{prefixes})/[a-z_][a-z_/@0-9]*)"', path.read_text()):
            try:
                metrics.check_name(name)
            except ValueError as error:
                pytest.fail(f"{path.relative_to(ROOT)}: {error}")


def test_metrics_of_the_table_are_written_somewhere() -> None:
    """What nobody writes is a promise that is not kept. Some names are put together from parts: of phases, of spreads, of a prefix."""
    code = "".join(path.read_text() for path in SOURCES if path.name != "metrics.py")
    for name in metrics.METRICS:
        first, *rest = name.split("/")
        spread = rest[-1] in ("mean", "max", "min") and f"{name.rpartition('/')[0]}/{{" in code
        part = first in ("timing_s", "critic") and f'"{rest[0]}"' in code
        found = f'"{name}"' in code or f"}}/{rest[0]}" in code or spread or part
        assert found, f"nothing writes {name}"


def test_events_in_the_code_are_in_the_registry() -> None:
    """Every emit with a literal name names a known event and every field it promises."""
    calls = 0
    for path in SOURCES:
        for call in re.finditer(r'(?:\.emit|\.note)\(\s*"([a-z_]+)"(?=\s*[,)])', path.read_text()):
            calls += 1
            name = call.group(1)
            assert name in events.EVENTS, f"{path.relative_to(ROOT)}: unknown event {name!r}"
    assert calls > 20


def test_extras_promised_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"s3", "gcs", "gpu", "vllm", "tracking", "smollm2", "dev"} <= set(project["optional-dependencies"])
    assert project["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run must be executable"
    assert "exec make test" in script.read_text()
    plan = subprocess.run(
        ["make", "-n", "-B", "test", "VENV=", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    order = [plan.index(part) for part in ("tools/install.py", "-m ruff", "-m mypy", "-m pytest")]
    assert order == sorted(order)  # so the last line is pytest's
    assert 'pytest -m "not full"' in plan


def test_the_installer_decides_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("everstep_install", ROOT / "tools" / "install.py")
    assert spec and spec.loader
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    asked: list[tuple[str, ...]] = []

    def pip(what: str, *arguments: str, required: bool = True) -> bool:
        asked.append(arguments)
        return "+cpu" not in arguments[0] or "--extra-index-url" in arguments

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install, "_installed", lambda name, oldest: False)
    monkeypatch.setattr(install, "has_nvidia", lambda: False)
    install.install_torch()
    assert asked == [("torch==2.13.0+cpu",), ("torch==2.13.0+cpu", "--extra-index-url", install.CPU_INDEX)]
    asked.clear()
    monkeypatch.setattr(install, "has_nvidia", lambda: True)
    install.install_torch()
    assert asked == [("torch>=2.7",)]
    asked.clear()
    monkeypatch.undo()
    monkeypatch.setattr(install, "pip", pip)
    install.install_torch()  # the torch of this environment is kept
    assert asked == [] and install._installed("torch", (2, 7)) and not install._installed("torch", (99,))


def test_uv_lock_is_of_this_project_and_of_public_registries() -> None:
    """What `uv lock` would change: the lock's record of our requirements; and no host that others could not reach, no CUDA build of torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "uv.lock").read_text()
    lock = tomllib.loads(text)
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    packages = {package["name"]: package for package in lock["package"]}
    wanted = set(project["dependencies"]).union(*project["optional-dependencies"].values())
    asked = {(Requirement(line).name.lower().replace("_", "-"), str(Requirement(line).specifier)) for line in wanted}
    locked = {(entry["name"], str(SpecifierSet(entry.get("specifier", "")))) for entry in packages["everstep"]["metadata"]["requires-dist"]}
    assert asked == locked, "run `uv lock`"
    of_torch = [edge for package in lock["package"] for edge in package.get("dependencies", []) if edge["name"] == "torch"]
    assert of_torch and all(edge.get("marker") in ("sys_platform == 'never'", "python_version < '0'") for edge in of_torch), "uv would install a build of torch"
