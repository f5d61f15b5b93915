/* A button that folds the widgets after it away. It works in the page alone, so also while no kernel answers. */

function render({ model, el }) {
  const button = document.createElement("button");
  const summary = document.createElement("span");
  button.type = "button";
  el.classList.add("ss-drawer-head");
  el.append(button, summary);

  const show = () => {
    button.setAttribute("aria-expanded", String(model.get("is_open")));
    button.textContent = model.get("label");
    summary.textContent = model.get("summary");
    el.parentElement?.classList.toggle("ss-open", model.get("is_open"));
  };
  button.addEventListener("click", () => {
    model.set("is_open", !model.get("is_open"));
    model.save_changes();
  });
  show();
  requestAnimationFrame(show); // by then the drawer is around it
  model.on("change", show);
  return () => model.off("change", show);
}

export default { render };
