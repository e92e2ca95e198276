"""Generates the Python of the wire contract: `python proto/generate.py [FOLDER]`.

protoc names modules after the folders of the .proto files (`from wan_diloco.v1 import x_pb2`), which
would need a second package called wan_diloco on the path. Here they land flat in
`wan_diloco/wire/generated`, and their imports are rewritten to that. Only messages are generated: gRPC
runs on generic handlers in `transport/`, so that nothing in `wire/` imports grpc.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
GENERATED = ROOT.parent / "wan_diloco" / "wire" / "generated"
PACKAGE = "wan_diloco/v1"
MODULE = "wan_diloco.wire.generated"
INIT = '"""Generated from proto/ by `make proto`; not edited by hand."""\n'


def generate(folder: Path) -> None:
    """Write all modules into the folder, in place of the generated ones that are there."""
    sources = sorted((ROOT / PACKAGE).glob("*.proto"))
    if not sources:
        raise SystemExit(f"no .proto files in {ROOT / PACKAGE}")
    # the mypy plugin is a program beside this interpreter, which need not be on the path
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}", f"--python_out={scratch}", f"--mypy_out=quiet:{scratch}"]
        if protoc.main([*arguments, *map(str, sources)]) != 0:
            raise SystemExit("protoc failed")
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("*_pb2.py"), *folder.glob("*_pb2.pyi")]:
            old.unlink()
        for made in sorted((Path(scratch) / PACKAGE).iterdir()):
            (folder / made.name).write_text(_flattened(made.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "__init__.py").write_text(INIT, encoding="utf-8")


def _flattened(text: str) -> str:
    """The module with its imports of siblings pointing into the flat package."""
    dotted = PACKAGE.replace("/", r"\.")
    text = re.sub(rf"^(from|import) {dotted}(?=[ .])", rf"\1 {MODULE}", text, flags=re.MULTILINE)
    # stubs also use the full dotted name inside annotations
    return re.sub(rf"(?<![\w./\"]){dotted}\.(?=\w+_pb2)", f"{MODULE}.", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=GENERATED)
    generate(parser.parse_args().folder)
