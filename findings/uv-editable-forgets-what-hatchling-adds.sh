#!/usr/bin/env bash
# uv: an editable install lacks the package that hatchling's editable wheel requires, and every start of Python fails.
#
# A project that sets `dev-mode-exact` gets an editable wheel with a module that imports `editables`, and hatchling
# writes `Requires-Dist: editables` into the metadata of that wheel. One would expect an installer to install it, as
# pip does. uv reads the dependencies from pyproject.toml instead, because they are not marked as dynamic there (see
# astral-sh/uv#2130, on other wheels). So nothing is said while installing. Afterwards each Python of the environment
# prints a traceback at its start, and the project cannot be imported. It helps to name `editables` among one's own
# dependencies.
#
# A few MB, mostly uv. Exit code 1: uv or hatchling behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/project/example"
echo 'print("imported")' > "$folder/project/example/__init__.py"
cat > "$folder/project/pyproject.toml" <<'EOF'
[build-system]
requires = ["hatchling==1.33.0", "editables==0.6"]
build-backend = "hatchling.build"
[project]
name = "example"
version = "1.0"
[tool.hatch.build]
dev-mode-exact = true
EOF
python3 -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install -qq uv==0.13.9

outcome() { # what `import example` prints at last
    "$1/bin/python" -c 'import example' 2>&1 | tail -1
}

python3 -m venv "$folder/by-pip"
"$folder/by-pip/bin/python" -m pip install -qq -e "$folder/project"
by_pip=$(outcome "$folder/by-pip")
python3 -m venv "$folder/by-uv"
"$folder/tools/bin/uv" pip install -q --no-cache --python "$folder/by-uv/bin/python" -e "$folder/project"
by_uv=$(outcome "$folder/by-uv" || true)
start=$("$folder/by-uv/bin/python" -c '' 2>&1 | grep -o 'ModuleNotFoundError.*' | tail -1 || true)
"$folder/tools/bin/uv" --version | cut -d' ' -f1-2
echo "installed by pip: $by_pip"
echo "installed by uv:  $by_uv"
echo "any start of Python after uv: $start"
[[ $by_pip == "imported" ]]
[[ $by_uv == "ModuleNotFoundError: No module named 'example'" ]]
[[ $start == "ModuleNotFoundError: No module named 'editables'" ]]
