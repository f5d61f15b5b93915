/* Opens the panels in Pyodide and adds the bytecode of what they import to the page's archive; bytecode.py calls it.

   node bytecode.mjs PYODIDE BUNDLE PANELS */

import { readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";

const [pyodideFolder, bundle, panels] = process.argv.slice(2);

const COMPILE = `
import io, json, sys, zipfile
from pathlib import Path
from py_compile import PycInvalidationMode, compile

import page_bridge

page_bridge.connect(lambda text, buffers: None)
for name in json.loads(panels):
    page_bridge.open_panel(name, "{}")

page, files = Path("/lib/page"), []
for module in list(sys.modules.values()):
    source = Path(getattr(module, "__file__", None) or "")
    if source.suffix != ".py" or not source.is_file():  # built in, an extension, or in the standard library's archive
        continue
    top = source.relative_to(page).parts[0] if source.is_relative_to(page) else None
    needs_source = top is None or top.startswith("shardscope")  # fields of specs are described in their source
    target = module.__cached__ if needs_source else str(source.with_suffix(".pyc"))
    compile(str(source), target, doraise=True, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    if not needs_source:
        source.unlink()
    if top is None:
        files.append(Path(target))
files += (path for path in page.rglob("*") if path.is_file())

written = io.BytesIO()
with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
    for path in sorted(files):
        archive.write(path, path.relative_to("/"))
written.getvalue()
`;

const { loadPyodide } = await import(resolve(pyodideFolder, "pyodide.mjs"));
const pyodide = await loadPyodide({ packages: ["numpy", "pydantic"] });
pyodide.unpackArchive(new Uint8Array(readFileSync(bundle)), "zip", { extractDir: "/lib/page" });
pyodide.globals.set("panels", panels);
pyodide.runPython("import sys; sys.path.insert(0, '/lib/page')");
writeFileSync(bundle, pyodide.runPython(COMPILE).toJs());
