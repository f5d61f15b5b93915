/* A table whose rows can be chosen by a click, or with the arrow keys once a row has the focus. `onChange` stands
 * in changes.js. */

function render({ model, el }) {
  const draw = () => {
    const focused = el.contains(document.activeElement);
    const table = document.createElement("table");
    table.className = "ss-plan-table";
    table.setAttribute("role", "grid");
    table.setAttribute("aria-label", "Ranked plans");
    const head = table.createTHead().insertRow();
    const classes = model.get("header").map((name) => "ss-column-" + name.replaceAll(/\W+/g, "-"));
    for (const [place, name] of model.get("header").entries()) {
      const cell = document.createElement("th");
      cell.className = classes[place];
      cell.scope = "col";
      cell.textContent = name;
      head.append(cell);
    }
    const body = table.createTBody();
    model.get("rows").forEach((cells, place) => {
      const row = body.insertRow();
      const isChosen = place + 1 === model.get("chosen");
      row.tabIndex = isChosen || (place === 0 && model.get("chosen") > model.get("rows").length) ? 0 : -1;
      row.setAttribute("aria-selected", String(isChosen));
      row.addEventListener("click", () => choose(place + 1));
      row.addEventListener("keydown", (event) => {
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        choose(Math.min(model.get("rows").length, Math.max(1, place + 1 + step)));
      });
      for (const [place, text] of cells.entries()) {
        const cell = row.insertCell();
        cell.className = classes[place];
        cell.textContent = text;
      }
    });
    el.replaceChildren(table);
    if (focused) table.querySelector("tr[aria-selected=true]")?.focus();
  };
  const choose = (rank) => {
    model.set("chosen", rank);
    model.save_changes();
  };
  draw();
  return onChange(model, ["header", "rows", "chosen"], draw);
}

export default { render };
