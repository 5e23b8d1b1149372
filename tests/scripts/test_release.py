"""A release changes three files, and takes its commands from the README."""

import datetime
import os
import tarfile

import pytest

from scripts import release

PROJECT = '[project]\nname = "ztk"\nversion = "0.1.0"\n'
CITATION = "title: ztk\nversion: 0.1.0\nlicense: Apache-2.0\n"
CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0\n\n- The first.\n"
DAY = datetime.date(2026, 12, 1)


@pytest.fixture
def root(tmp_path):
    for name, text in {"pyproject.toml": PROJECT, "CITATION.cff": CITATION, "CHANGELOG.md": CHANGELOG}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_version_and_changelog_are_changed(root):
    release.set_version(root, version="0.2.0", day=DAY)
    assert 'version = "0.2.0"' in (root / "pyproject.toml").read_text()
    assert "version: 0.2.0\ndate-released: 2026-12-01\n" in (root / "CITATION.cff").read_text()
    changes = (root / "CHANGELOG.md").read_text()
    assert release.section(changes, name="0.2.0").strip() == "### Added\n\n- A thing."
    assert release.section(changes, name="Unreleased").strip() == ""
    assert release.section(changes, name="0.1.0").strip() == "- The first."
    (root / "CHANGELOG.md").write_text(changes.replace("## Unreleased\n", "## Unreleased\n\n- More.\n"))
    release.set_version(root, version="0.10.0", day=DAY + datetime.timedelta(days=1))
    assert (root / "CITATION.cff").read_text().count("date-released") == 1


@pytest.mark.parametrize(
    ("version", "fault"), [("0.1.0", "must be above"), ("0.0.9", "must be above"), ("1.0", "three numbers")]
)
def test_a_version_that_cannot_follow_is_refused(root, version, fault):
    with pytest.raises(ValueError, match=fault):
        release.set_version(root, version=version, day=DAY)
    assert (root / "pyproject.toml").read_text() == PROJECT


def test_nothing_to_release_is_refused(root):
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0\n\n- The first.\n")
    with pytest.raises(ValueError, match="Unreleased is empty"):
        release.set_version(root, version="0.2.0", day=DAY)


def test_the_readme_has_two_commands():
    first, second = release.readme_commands((release.ROOT / "README.md").read_text())
    assert "run.py zero=stage3 offload=nvme" in first and second.endswith("-m pytest -n 3")
    assert first.count("venv") >= 1 and "pip install -e" in second


def test_an_sdist_has_the_link_of_a_checkout(tmp_path):
    """Without it an installed sdist has no module `ztk.experiments`."""
    (tmp_path / "a.py").write_text("x = 1\n")
    sdist = tmp_path / "ztk-0.2.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "a.py", arcname="ztk-0.2.0/experiments/a.py")
    release.add_link(sdist, path=release.LINK, target=os.readlink(release.ROOT / release.LINK))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    assert (tmp_path / "ztk-0.2.0" / "ztk" / "experiments" / "a.py").read_text() == "x = 1\n"
