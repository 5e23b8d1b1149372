"""Cuts a release: version, changelog, wheel and sdist, and a rehearsal in fresh environments outside of the checkout.

    python scripts/release.py 0.2.0 FOLDER            changes the version here, builds and rehearses in FOLDER, prints the tag command
    python scripts/release.py 0.2.0 FOLDER --no-tests without the whole test suite

The changes stay uncommitted: look at them, commit, tag and push by the printed commands. The rehearsal unpacks the sdist, runs the README's two
commands there, and runs the research example of docs/extending.md from the installed wheel. Exit code 1 if a step fails.
"""

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = "ztk/experiments"  # of a checkout and an sdist; a wheel has the folder itself
_EXAMPLE = (
    *("--config-dir", "conf", "model=conv", "loss._target_=conv_lm.smooth_loss", "user.width=16", "train.steps=20"),
    *("zero=stage3", "offload=nvme", "launch.ranks=2", "logger=disabled"),
)


def set_version(root: Path, *, version: str, day: datetime.date) -> None:
    """Writes the version into pyproject.toml and CITATION.cff, and names the changelog's unreleased section after it.

    Raises ValueError for a version that is not three numbers or not above the current one, and for an empty section.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"{version}: a version is three numbers, such as 0.2.0")
    project, citation, changelog = (root / name for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"))
    text = project.read_text()
    current = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert current is not None, "pyproject.toml has a version"
    if _numbers(version) <= _numbers(current[1]):
        raise ValueError(f"{version}: must be above the current version, {current[1]}")
    changes = changelog.read_text()
    if not section(changes, name="Unreleased").strip():
        raise ValueError("CHANGELOG.md: the section Unreleased is empty; there is nothing to release")
    project.write_text(text.replace(current[0], f'version = "{version}"'))
    cited = re.sub(
        r"^version: .*$", f"version: {version}\ndate-released: {day}", citation.read_text(), flags=re.MULTILINE
    )
    citation.write_text(re.sub(r"(date-released: .*\n)date-released: .*\n", r"\1", cited))
    changelog.write_text(changes.replace("## Unreleased\n", f"## Unreleased\n\n## {version} ({day})\n", 1))


def section(changelog: str, *, name: str) -> str:
    """The text below the heading of a version, without the heading. Raises ValueError if there is no such heading."""
    found = re.search(rf"^## {re.escape(name)}(?: \(.*\))?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section {name}")
    return found[1]


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the wheel and the sdist of the working tree into `folder`. Returns their paths."""
    run([sys.executable, "-m", "hatchling", "build", "--directory", str(folder)], cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("ztk-*.whl"), folder.glob("ztk-*.tar.gz")
    add_link(sdist, path=LINK, target=os.readlink(ROOT / LINK))
    return wheel, sdist


def add_link(sdist: Path, *, path: str, target: str) -> None:
    """Adds a symbolic link to an sdist, which hatchling leaves out. path: below the sdist's own folder. target: relative to the link."""
    complete = sdist.with_suffix(".new")
    with tarfile.open(sdist) as given, tarfile.open(complete, "w:gz") as archive:
        for member in given:
            archive.addfile(member, given.extractfile(member) if member.isfile() else None)
        link = tarfile.TarInfo(f"{sdist.name.removesuffix('.tar.gz')}/{path}")
        link.type, link.linkname = tarfile.SYMTYPE, target
        archive.addfile(link)
    complete.replace(sdist)


def rehearse(folder: Path, *, wheel: Path, sdist: Path, with_tests: bool) -> None:
    """Runs the README's commands in the unpacked sdist, and the research example from the wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    for command in readme_commands((unpacked / "README.md").read_text())[: 2 if with_tests else 1]:
        run(["bash", "-c", command], cwd=unpacked)
    mine = folder / "mine"
    shutil.copytree(unpacked / "examples" / "research", mine)
    run([sys.executable, "-m", "venv", str(mine / ".venv")], cwd=mine)
    python = str(mine / ".venv" / "bin" / "python")
    run([python, "-m", "pip", "install", "-q", str(wheel), "-c", str(unpacked / "constraints.txt")], cwd=mine)
    run([str(mine / ".venv" / "bin" / "ztk"), *_EXAMPLE], cwd=mine)


def readme_commands(readme: str) -> list[str]:
    """The two commands of the section Start, each of which does all set-up."""
    block = re.search(r"^## Start\n.*?```bash\n(.*?)```", readme, re.MULTILINE | re.DOTALL)
    assert block is not None, "the README has a section Start"
    return block[1].replace("\\\n", "").strip().splitlines()


def run(command: list[str], *, cwd: Path) -> None:
    """Runs a command and shows it. Raises SystemExit if it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    if subprocess.run(command, cwd=cwd).returncode:
        raise SystemExit(f"failed: {shlex.join(command)}, in {cwd}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("folder", type=Path, help="a new folder outside of the checkout")
    parser.add_argument("--no-tests", action="store_true", help="leave out the README's second command")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if folder.exists() or folder.is_relative_to(ROOT):
        print(f"{folder}: name a new folder outside of {ROOT}", file=sys.stderr)
        return 2
    try:
        set_version(ROOT, version=options.version, day=datetime.date.today())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder.mkdir(parents=True)
    wheel, sdist = build(folder)
    rehearse(folder, wheel=wheel, sdist=sdist, with_tests=not options.no_tests)
    notes = folder / "notes.md"
    notes.write_text(section((ROOT / "CHANGELOG.md").read_text(), name=options.version).strip() + "\n")
    print(f"rehearsed: {wheel.name}, {sdist.name}, notes in {notes}. Next:")
    print(
        f"  git commit -am 'release: {options.version}'\n  git tag -a v{options.version} -F {notes} && git push --follow-tags"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
