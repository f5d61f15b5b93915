/** Copy a text; a page without a secure address has no clipboard but that of a selection, here of the element `shown`. */
async function copy(text, shown) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  getSelection().selectAllChildren(shown);
  if (!document.execCommand("copy")) throw new Error("no clipboard");
}
