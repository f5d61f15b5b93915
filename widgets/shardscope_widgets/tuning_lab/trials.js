/* A table of trials, patched cell by cell: chosen by click or arrow keys, sorted by a click on a heading. */

function render({ model, el }) {
  const table = document.createElement("table");
  table.className = "ss-plan-table ss-trial-table";
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", "Trials");
  const head = table.createTHead().insertRow();
  const body = table.createTBody();
  const known = new Map();
  let sorted = { column: 0, way: -1 };
  el.append(table);

  const heads = () => {
    head.replaceChildren(...model.get("header").map((name, column) => {
      const cell = document.createElement("th");
      const button = document.createElement("button");
      cell.scope = "col";
      button.type = "button";
      button.textContent = name;
      button.title = `Sort by ${name}`;
      button.addEventListener("click", () => {
        sorted = { column, way: sorted.column === column ? -sorted.way : 1 };
        draw();
      });
      cell.append(button);
      return cell;
    }));
    known.clear();
    body.replaceChildren();
    draw();
  };

  const compare = (a, b) => {
    const [x, y] = [a.keys[sorted.column], b.keys[sorted.column]];
    if (x === y) return b.number - a.number;
    if (x === null || y === null) return x === null ? 1 : -1;
    return (x < y ? -1 : 1) * sorted.way;
  };

  const choose = (number) => {
    model.set("chosen", number);
    model.save_changes();
  };

  const make = ({ number, cells }) => {
    const row = document.createElement("tr");
    row.dataset.number = number;
    cells.forEach(() => row.insertCell());
    row.addEventListener("click", () => choose(number));
    row.addEventListener("keydown", (event) => {
      const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      if (!next) return;
      choose(Number(next.dataset.number));
      next.focus();
    });
    known.set(number, row);
    return row;
  };

  const draw = () => {
    const rows = [...model.get("rows")].sort(compare);
    const chosen = model.get("chosen");
    [...head.children].forEach((cell, column) => {
      const way = column === sorted.column ? (sorted.way > 0 ? "ascending" : "descending") : "none";
      if (cell.getAttribute("aria-sort") !== way) cell.setAttribute("aria-sort", way);
    });
    rows.forEach((told, place) => {
      const row = known.get(told.number) ?? make(told);
      told.cells.forEach((text, column) => {
        const cell = row.cells[column];
        if (cell.textContent !== text) { cell.textContent = text; cell.title = text; }
      });
      if (row.className !== told.state) row.className = told.state;
      row.setAttribute("aria-selected", String(told.number === chosen));
      row.tabIndex = told.number === chosen || (place === 0 && !known.has(chosen)) ? 0 : -1;
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
    });
    while (body.children.length > rows.length) {
      known.delete(Number(body.lastElementChild.dataset.number));
      body.lastElementChild.remove();
    }
  };

  heads();
  model.on("change:header", heads);
  model.on("change:rows change:chosen", draw);
  return () => {
    model.off("change:header", heads);
    model.off("change:rows change:chosen", draw);
  };
}

export default { render };
