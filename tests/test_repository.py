"""The files that a reader of the repository looks for are there, parse, and agree with the project."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAPERS = {"SPDY": "2201.13096", "Shfl-BW": "2203.05016", "N:M Structured Sparsity": "2209.07617"}


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_is_of_this_version_and_names_the_papers() -> None:
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what CFF 1.2.0 requires
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"].split(" AND ")
    assert citation["authors"] == PROJECT["authors"] == [{"name": "latbench developers"}]
    for title, number in PAPERS.items():
        (paper,) = (paper for paper in citation["references"] if title in paper["title"])
        assert {"type", "title", "authors"} <= set(paper)  # what CFF 1.2.0 requires of a reference
        assert all({"family-names", "given-names"} == set(author) for author in paper["authors"])
        assert paper["year"] == 2022
        assert {"type": "other", "value": f"arXiv:{number}"} in paper["identifiers"]


def test_the_licence_is_the_apache_licence_and_that_of_the_data_names_its_own() -> None:
    words = (ROOT / "LICENSE").read_text().split()
    assert " ".join(words).startswith("Apache License Version 2.0, January 2004")
    assert len(words) == 1581
    assert "SPDX-License-Identifier: CC-BY-4.0\n" in (ROOT / "datasets" / "LICENSE").read_text()


def test_the_changelog_has_a_section_for_this_version() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert re.fullmatch(rf"## {re.escape(PROJECT['version'])} \((unreleased|\d{{4}}-\d\d-\d\d)\)", versions[0])
    kinds = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert "Added" in kinds


def test_the_hooks_before_a_commit_are_the_commands_of_make_check() -> None:
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = [hook["entry"] for hook in repository["hooks"]]
    target = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in target[1].splitlines()]
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in repository["hooks"])


def test_the_demo_installs_engines_and_the_report_but_no_tools_of_developers() -> None:
    rules = dict(re.findall(r"^(\S+): ?(.*\n(?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    installed = {
        name: set(",".join(re.findall(r"'\.\[([a-z0-9,]+)\]'", rule)).split(",")) for name, rule in rules.items()
    }
    assert rules["demo"].startswith("$(READY)\n")
    assert installed["$(READY)"] == {"onnx", "openvino", "report"}
    assert rules["$(DEV_READY)"].startswith("$(READY)\n")
    assert {"dev", "notebooks", "figures"} <= installed["$(DEV_READY)"]
    assert all(extras - {""} <= set(PROJECT["optional-dependencies"]) for extras in installed.values())
    engines = {word for name in ("onnx", "openvino") for word in PROJECT["optional-dependencies"][name]}
    assert {"onnxruntime", "openvino"} <= {re.split("[<>=]", word)[0] for word in engines}


def test_the_named_python_versions_begin_with_the_least_one_that_is_allowed() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert named == [f"3.{11 + place}" for place in range(len(named))]
