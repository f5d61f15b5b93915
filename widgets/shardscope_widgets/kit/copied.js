/* A text with a title and a button that copies it. `copy` is in copy.js. */

function render({ model, el }) {
  el.innerHTML = '<div class="ss-copied"><div><b></b><button type="button">Copy</button></div>'
    + '<pre tabindex="0"></pre></div>';
  const [title, button, pre] = el.querySelectorAll("b, button, pre");
  const draw = () => {
    title.textContent = model.get("title");
    pre.textContent = model.get("text");
    pre.setAttribute("aria-label", model.get("title"));
    button.textContent = "Copy";
  };
  button.addEventListener("click", () => copy(pre.textContent).then(
    () => { button.textContent = "Copied"; },
    () => { getSelection().selectAllChildren(pre); button.textContent = "Press Ctrl+C"; },
  ));
  model.on("change:text change:title", draw);
  draw();
  return () => model.off("change:text change:title", draw);
}

export default { render };
