"""Test what a release publishes, as far as no container engine is needed: distributions, SBOM, chart and workflows.

The image is built and run in CI, and signed by the release workflow. Neither happens here.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

import flopwatch
from demo.servers import docker_registry
from tests.support import ROOT
from tests.support.machine import PATIENCE, reserve, until

GITHUB = ROOT / ".github"
CHART = ROOT / "helm"
VERSION = flopwatch.__version__
REGISTRY = "registry.example.com/owner"
# Without Node, and without the packages of the checkout.
ALONE = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}


def run(*command: str | Path, **more: Any) -> str:
    """Return what a command prints. It may not fail."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


# Distributions.


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source archive, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new virtual environment with flopwatch[exporter] from the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    run(*pip, "install", f"{wheel}[exporter]", env={**os.environ, "PYTHONPATH": ""})
    return folder


def metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"flopwatch-{VERSION}.dist-info/METADATA"))


@pytest.mark.long
def test_an_index_would_accept_the_distributions(dist: Path) -> None:
    files = sorted(dist.iterdir())
    assert [file.name for file in files] == [f"flopwatch-{VERSION}-py3-none-any.whl", f"flopwatch-{VERSION}.tar.gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    assert metadata(files[0])["License-Expression"] == "Apache-2.0"
    with tarfile.open(files[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"contrib/completion/flopwatch.fish", "contrib/man/flopwatch.1", "LICENSE", "CHANGELOG.md"} <= names
    assert {name.partition("/")[0] for name in names} - {"", "LICENSE", "CHANGELOG.md", "README.md"} == {
        *("PKG-INFO", ".gitignore", "pyproject.toml", "hatch_build.py"),
        *("contrib", "exporter", "helm", *(["viewer"] if (ROOT / "viewer" / "dist" / "index.html").is_file() else [])),
    }


@contextmanager
def served(installed: Path, folder: Path, environ: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Run the installed exporter of a simulated node until the block ends. Yield its addresses for metrics and OTLP."""
    flags = ["exporter", "--simulate", "h100x8", "--listen", "127.0.0.1:0", "--otlp-listen", "127.0.0.1:0"]
    log = folder / "log"
    with log.open("w") as output:
        command = [str(installed / "bin" / "flopwatch"), *flags, "--state", str(folder / "state")]
        exporter = subprocess.Popen(command, stderr=output, env=environ, cwd=folder)
    try:
        until(lambda: "listening metrics=" in log.read_text() or exporter.poll() is not None)
        address = re.search(r"listening metrics=(\S+) otlp=(\S+)", log.read_text())
        assert address is not None, log.read_text()
        until(lambda: scraped(address[1]).count("\ngpu_present{") == 8)
        yield address[1], address[2]
    finally:
        exporter.terminate()
        assert exporter.wait(PATIENCE) == 0


def scraped(address: str) -> str:
    """Return the metrics that an exporter serves."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


@pytest.mark.long
def test_an_installed_exporter_serves_metrics_without_node_and_without_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    environ = {**ALONE, "PATH": str(installed / "bin")}
    assert shutil.which("node", path=environ["PATH"]) is None
    program = installed / "bin" / "flopwatch"
    assert run(program, "--version", env=environ, cwd=tmp_path) == f"flopwatch {VERSION}\n"
    with served(installed, tmp_path, environ) as (metrics, _):
        found = json.loads(run(program, "check", "--url", f"http://{metrics}/metrics", "--json", env=environ))
        assert found["verdict"] == "ok"


TRAINING = """
import time, torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begin = time.monotonic()
while time.monotonic() < begin + 5:
    model(torch.rand(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("card", [False, True], ids=["alone", "with a simulated card"])
def test_an_installed_hook_shows_mfu_in_five_seconds_of_training(installed: Path, tmp_path: Path, card: bool) -> None:
    # PyTorch is linked, because it takes minutes to install. Nothing else of this environment can be imported.
    (tmp_path / "torch").mkdir()
    for name in ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "filelock"):
        (tmp_path / "torch" / name).symlink_to(Path(sysconfig.get_path("platlib")) / name)
    for name in ("jinja2", "markupsafe", "fsspec", "typing_extensions.py"):
        (tmp_path / "torch" / name).symlink_to(Path(sysconfig.get_path("platlib")) / name)
    (tmp_path / "train.py").write_text(TRAINING)
    environ = {**ALONE, "PATH": str(installed / "bin"), "PYTHONPATH": str(tmp_path / "torch"), "OMP_NUM_THREADS": "1"}
    flags = ("--top", "--name", "tiny", "--tokens-per-step", "64", "--peak-flops", "1e12")
    with ExitStack() as stack:
        endpoint = "http://127.0.0.1:9"
        if card:
            metrics, otlp = stack.enter_context(served(installed, tmp_path, {**ALONE, "PATH": environ["PATH"]}))
            endpoint = f"http://{otlp}"
        process = subprocess.Popen(
            [str(installed / "bin" / "flopwatch"), "run", *flags, "train.py"],
            env={**environ, "FLOPWATCH_ENDPOINT": endpoint},
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        if card:  # the series end with the process
            until(lambda: '\ntraining_model_flops_total{run="tiny",rank="0"}' in scraped(metrics))
        _, printed = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, printed
    assert re.search(r"^flopwatch: tiny: step \d+, MFU [\d.]+ %, ", printed, re.MULTILINE), printed
    assert re.search(r"^flopwatch: tiny completed after \d+ steps: MFU [\d.]+ %, ", printed, re.MULTILINE), printed
    assert f"{'metrics went to' if card else 'nothing took the metrics at'} {endpoint}/v1/metrics" in printed


@pytest.mark.long
@pytest.mark.skipif(shutil.which("man") is None, reason="man is Debian's package man-db")
def test_man_finds_the_pages_of_an_installation_whose_programs_are_on_path(installed: Path) -> None:
    found = run("man", "-w", "flopwatch-check", env={**ALONE, "PATH": f"{installed / 'bin'}:{os.environ['PATH']}"})
    assert found == f"{installed}/share/man/man1/flopwatch-check.1\n"


@pytest.mark.long
def test_the_sbom_of_an_installation_has_what_the_wheel_requires_and_nothing_else(
    dist: Path, installed: Path, tmp_path: Path
) -> None:
    run(
        ROOT / ".ci" / "sbom",
        installed / "bin" / "python",
        tmp_path / "sbom.json",
        env={**os.environ, "PYTHON": sys.executable},
    )
    sbom = json.loads((tmp_path / "sbom.json").read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    versions = {normal(one["name"]): one["version"] for one in sbom["components"]}
    listed = run(sys.executable, "-m", "pip", "--python", installed / "bin" / "python", "list", "--format=json")
    assert versions == {normal(one["name"]): one["version"] for one in json.loads(listed)}
    (wheel,) = dist.glob("*.whl")
    required = metadata(wheel).get_all("Requires-Dist") or []
    direct = {
        normal(re.split(r"[<>=~!; \[]", line)[0])
        for line in required
        if "extra ==" not in line or re.search(r"extra == ['\"]exporter['\"]", line)
    }
    names = {one["bom-ref"]: normal(one["name"]) for one in sbom["components"]}
    edges = {
        names[one["ref"]]: {names[to] for to in one.get("dependsOn", ())}
        for one in sbom["dependencies"]
        if one["ref"] in names
    }
    assert len(direct) > 10
    assert direct <= versions.keys()
    assert direct <= edges["flopwatch"]
    reached, last = {"flopwatch"}, set[str]()
    while reached != last:
        last, reached = reached, reached | {to for name in reached for to in edges.get(name, ())}
    assert reached == versions.keys(), "a package that none requires"
    (own,) = (one for one in sbom["components"] if one["name"] == "flopwatch")
    assert [one["license"]["id"] for one in own["licenses"]] == ["Apache-2.0"]


def normal(name: str) -> str:
    """Return a package's name in PyPI's form."""
    return re.sub(r"[-_.]+", "-", name).lower()


# The chart.


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """Return the chart after the release workflow named the released image in it."""
    workflow = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())
    (step,) = (step["run"] for step in workflow["jobs"]["chart"]["steps"] if "helm package" in step.get("run", ""))
    edit = step[step.index("sed -i") : step.index("helm template")]
    shutil.copytree(CHART, tmp_path / "helm")
    run("sh", "-euc", edit, cwd=tmp_path, env={**os.environ, "REGISTRY": REGISTRY, "VERSION": VERSION})
    return tmp_path / "helm"


def test_the_packaged_chart_pulls_the_released_image_and_has_every_file(released: Path, tmp_path: Path) -> None:
    assert helm.lint(released, strict=True)["errors"] == []
    archive = Path(helm.package(released, destination=tmp_path))
    assert archive.name == f"flopwatch-{VERSION}.tgz"
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    ignored = (CHART / ".helmignore").read_text().split()
    tracked = run("git", "ls-files", ".", cwd=CHART).splitlines()
    kept = {
        name
        for name in tracked
        if not any(Path(name).match(f"{one.rstrip('/')}*") or name.startswith(one) for one in ignored)
    }
    assert names - {".helmignore"} == kept - {".helmignore"}
    with helm.Chart.load(archive) as chart:
        text = "\n".join(chart.render({}, name="demo", namespace="monitoring").values())
    assert set(re.findall(r"image: [\"']?([^\s\"']*flopwatch:[^\s\"']*)", text)) == {f"{REGISTRY}/flopwatch:{VERSION}"}


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Run an OCI registry on loopback, and yield its address."""
    with reserve() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        settings = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
            "http": {"addr": address},
        }
        (folder / "registry.yml").write_text(yaml.safe_dump(settings))
        log = folder / "registry.log"
        with log.open("w") as output:
            running = subprocess.Popen(
                [docker_registry(), "serve", folder / "registry.yml"], stdout=output, stderr=output
            )
        try:
            until(lambda: answers(f"http://{address}/v2/") or running.poll() is not None)
            assert running.poll() is None, log.read_text()
            yield address
        finally:
            running.terminate()
            running.wait(PATIENCE)


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE):
            return True
    except OSError:
        return False


@pytest.mark.long
def test_the_chart_is_pushed_to_an_oci_registry_and_pulled_unchanged(released: Path, tmp_path: Path) -> None:
    archive = Path(helm.package(released, destination=tmp_path))
    with registry(tmp_path) as address:
        helm.push(archive, f"oci://{address}/charts", plain_http=True)
        (tmp_path / "pulled").mkdir()
        helm.pull(
            f"oci://{address}/charts/flopwatch", version=VERSION, destination=tmp_path / "pulled", plain_http=True
        )
    assert (tmp_path / "pulled" / archive.name).read_bytes() == archive.read_bytes()


# The workflows.


@pytest.mark.long
def test_github_would_accept_its_files(tmp_path: Path) -> None:
    for schema, files in (
        ("vendor.github-workflows", sorted(GITHUB.glob("workflows/*.yml"))),
        ("vendor.github-actions", sorted(GITHUB.glob("actions/*/action.yml"))),
        ("vendor.dependabot", [GITHUB / "dependabot.yml"]),
    ):
        run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files)
    broken = tmp_path / "release.yml"
    broken.write_text((GITHUB / "workflows" / "release.yml").read_text().replace("timeout-minutes", "time-limit", 1))
    with pytest.raises(AssertionError, match="'time-limit' was unexpected"):
        run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", broken)


def test_zizmor_finds_no_risk_in_the_workflows() -> None:
    zizmor = shutil.which("zizmor", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    assert zizmor is not None, "it is in the group dev"
    run(zizmor, "--offline", "--no-progress", "--min-severity=medium", GITHUB)


def test_everything_that_is_published_is_signed_without_a_key() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    for name, signature in (("package", "sign-blob"), ("image", "sign --yes --recursive"), ("chart", "sign --yes")):
        steps = "\n".join(step.get("run", "") for step in jobs[name]["steps"])
        assert f"cosign {signature}" in steps
        assert "--key" not in steps
        assert jobs[name]["permissions"]["id-token"] == "write"
    (build,) = (step["with"] for step in jobs["image"]["steps"] if "build-push-action" in step.get("uses", ""))
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["sbom"], build["provenance"], build["push"]) == (True, "mode=max", True)
