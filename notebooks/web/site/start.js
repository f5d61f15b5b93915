/* How Pyodide starts with compiled packages in its memory, where the page writes its memory and where it reads it.

   A compiled module has an address in memory and a range in the table of functions, so that memory can only be read
   where the same modules are loaded, in the same order, before anything else takes a place. */

import createModule from "./pyodide/pyodide.asm.mjs";
import { loadPyodide } from "./pyodide/pyodide.mjs";

/** Load Pyodide with the compiled modules `libraries`; call `whenCreated` with its module before memory is read. */
export function start(libraries, options, whenCreated = () => {}) {
  return loadPyodide({
    ...options,
    async createPyodideModule(settings) {
      const { locateFile } = settings;
      settings.locateFile = (name) => locateFile(name.replace(/^\//, ""));
      settings.dynamicLibraries = libraries;
      const module = await createModule(settings);
      await whenCreated(module);
      return module;
    },
  });
}

/** Make room in `module` for written memory, and keep there what differs between browsers. */
export function grow(module, memory) {
  const begin = new Uint32Array(memory.buffer, 0, 2)[1]; // what is before belongs to Pyodide
  module.growMemory(memory.length - begin);
  const trampoline = module.__PyRuntime + module.HEAP32[module.__PyEM_EMSCRIPTEN_TRAMPOLINE_OFFSET / 4];
  memory.set(module.HEAPU8.subarray(trampoline, trampoline + 4), begin + trampoline); // there is none on iOS
}

/** Write a file, with the folders that it is in. */
export function put(FS, path, bytes) {
  FS.mkdirTree(path.slice(0, path.lastIndexOf("/")));
  FS.writeFile(path, bytes, { canOwn: true });
}
