"""The examples do what they say: the Dockerfile's runner in small roots, and what their texts promise."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from shipping_fixtures import UID, unprivileged

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNNER = EXAMPLES / "docker/run_stages.py"
TOOLS = ("sh", "cat", "id", "touch", "env", "mkdir")
DOCKERFILE = """
# a comment
ARG BASE=anything
FROM ${BASE} AS builder
ARG WORD=default
COPY one.txt folder /src/
COPY one.txt /renamed.txt
ENV MADE=/made EMPTY=""
RUN mkdir $MADE && \\
    cat /src/one.txt /src/inner.txt /renamed.txt > $MADE/out && echo ${WORD}-$WORD >> $MADE/out

FROM ${BASE} AS runtime
COPY --from=builder /made /opt/made
ENV PLACE=/opt/made/out NOTHING=""
USER %d:%d
CMD ["/bin/sh", "-c", "id -u; cat $PLACE; touch /opt/made/x || echo read-only; cat /proc/net/dev; echo home=$HOME"]
"""


@pytest.fixture
def base(tmp_path):
    """A root file system with a shell and little more."""
    root = tmp_path / "base"
    for folder in ("proc", "dev", "etc", "tmp"):
        (root / folder).mkdir(parents=True)
    for tool in TOOLS:
        _install(root, Path(shutil.which(tool)).resolve(), [f"bin/{tool}", f"usr/bin/{tool}"])
    return root


def _install(root, program, places):
    needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+) \(0x", needed):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    for place in places:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, root / place)


@pytest.fixture
def stages(tmp_path, base):
    """A function that runs a Dockerfile's text in a small context."""
    context = tmp_path / "context"
    (context / "folder").mkdir(parents=True)
    (context / "one.txt").write_text("one\n")
    (context / "folder/inner.txt").write_text("inner\n")

    def run(text, *options):
        (tmp_path / "Dockerfile").write_text(text)
        places = ["--base", base, "--work", tmp_path / "work", "--context", context]
        command = [sys.executable, RUNNER, *places, *options, tmp_path / "Dockerfile"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


@pytest.mark.skipif(unprivileged() is not None, reason=str(unprivileged()))
def test_stages_are_run_step_by_step_and_the_last_as_its_user_on_a_read_only_root(stages):
    done = stages(DOCKERFILE % (UID, UID), "--arg", "WORD=given")

    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not re.match(r" +\d+\.\d s  ", line)]
    assert said[:6] == [str(UID), "one", "inner", "one", "given-given", "read-only"]
    assert [line.split(":")[0].strip() for line in said[6:-1] if ":" in line] == ["lo"]
    assert said[-1] == "home="


@pytest.mark.skipif(unprivileged() is not None, reason=str(unprivileged()))
def test_a_step_that_fails_ends_the_run(stages):
    done = stages("FROM x\nRUN cat /none\nCMD []\n")

    assert done.returncode == 1
    assert "RUN cat /none: status 1" in done.stderr


def test_an_instruction_that_is_not_known_is_an_error(stages):
    done = stages("FROM x\nHEALTHCHECK NONE\n")

    assert done.returncode == 1
    assert "HEALTHCHECK is not known" in done.stderr


def steps_of_the_dockerfile():
    spec = importlib.util.spec_from_file_location("run_stages", RUNNER)
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_stages"] = module
    spec.loader.exec_module(module)
    return list(module.steps((EXAMPLES / "docker/Dockerfile").read_text(encoding="utf-8")))


def test_the_dockerfile_copies_what_exists_and_its_last_stage_runs_nothing_as_root():
    steps = steps_of_the_dockerfile()
    copied = [step.text.split() for step in steps if step.instruction == "COPY"]
    sources = [name for words in copied if not words[0].startswith("--from=") for name in words[:-1]]
    last = steps[max(i for i, step in enumerate(steps) if step.instruction == "FROM") :]

    assert sources
    assert all((EXAMPLES.parent / source).exists() for source in sources)
    assert [step.text for step in last if step.instruction == "USER"] == [f"{UID}:{UID}"]
    assert not [step for step in last if step.instruction == "RUN"]


@pytest.mark.skipif(
    "JITSPARK_TEST_STAGES" not in os.environ,
    reason="JITSPARK_TEST_STAGES gives no options for run_stages.py (--base of a Debian root, pip's settings)",
)
def test_the_dockerfile_runs_stage_by_stage(tmp_path):
    small = ["--arg", "TP=1", "--arg", "TARGETS=sm_90a", "--arg", "GEOMETRY=tiny"]
    options = shlex.split(os.environ["JITSPARK_TEST_STAGES"])
    command = [sys.executable, RUNNER, "--work", tmp_path / "work", *small, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^\d+ kernels for sm_90a and \d\d+ plans loaded in", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_one(script):
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("file", sorted((EXAMPLES / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
class TestKubernetes:
    """Against the schemas of the API, field by field; the oldest version that a file names, and a later one."""

    @pytest.mark.parametrize("version", ["1.33", "1.34"])
    def test_takes_every_object(self, file, version):
        objects = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))

        assert objects
        for each in objects:
            kubernetes_validate.validate(each, version, strict=True)

    def test_would_notice_a_misspelt_field(self, file):
        (each,) = yaml.safe_load_all(file.read_text(encoding="utf-8"))
        each["spec"]["containers"][0]["volumeMounts"][0]["readonly"] = True

        with pytest.raises(kubernetes_validate.ValidationError, match="readonly"):
            kubernetes_validate.validate(each, "1.33", strict=True)


def test_examples_name_only_variables_that_exist_and_keep_the_cache_read_only():
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(JITSPARK_[A-Z_]+)`", readme))
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    for path, text in texts.items():
        assert set(re.findall(r"\bJITSPARK_[A-Z_]+", text)) <= known, path
    promised = ("runAsNonRoot: true", "readOnlyRootFilesystem: true", "readOnly: true")
    for path in (EXAMPLES / "kubernetes").glob("*.yaml"):
        assert all(line in texts[path] for line in promised)
