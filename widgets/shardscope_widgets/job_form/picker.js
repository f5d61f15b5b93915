/* A select box with grouped options. `onChange` stands in changes.js. */

function render({ model, el }) {
  const id = `ss-picker-${Math.random().toString(36).slice(2)}`;  // not a counter: each widget loads its own copy of this module
  const label = document.createElement("label");
  const select = document.createElement("select");
  label.className = "widget-label";
  label.htmlFor = select.id = id;
  el.classList.add("widget-inline-hbox", "widget-dropdown");
  el.append(label, select);

  const fill = () => {
    label.textContent = model.get("description");
    label.title = select.title = model.get("tooltip");
    select.replaceChildren(...model.get("groups").map(([name, values]) => {
      const group = document.createElement("optgroup");
      group.label = name;
      group.append(...values.map((value) => new Option(value, value)));
      return group;
    }));
    show();
  };
  const show = () => { select.value = model.get("value"); };
  fill();
  select.addEventListener("change", () => {
    model.set("value", select.value);
    model.save_changes();
  });
  const ends = [onChange(model, ["value"], show), onChange(model, ["groups", "description", "tooltip"], fill)];
  return () => ends.forEach((end) => end());
}

export default { render };
