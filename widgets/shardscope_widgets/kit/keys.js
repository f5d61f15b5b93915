/* Keys of a panel's own controls, which shortcuts of the page must not take: Notebook 7 has some for arrows and Enter. */

const OWN_KEYS = /^(Arrow|Page|Home|End|Enter$| $)/;

/** Keep such keys in a panel; return a function that ends it. */
function keepKeys(panel) {
  const keep = ({ target, key, shiftKey, ctrlKey, altKey, metaKey }) => {
    if (!panel.contains(target)) return;
    const isOwn = OWN_KEYS.test(key) && !(shiftKey || ctrlKey || altKey || metaKey);
    target.toggleAttribute("data-lm-suppress-shortcuts", isOwn); // read by Lumino, with which Jupyter handles keys
  };
  window.addEventListener("keydown", keep, true); // before Jupyter's own listener, which is the document's
  return () => window.removeEventListener("keydown", keep, true);
}
