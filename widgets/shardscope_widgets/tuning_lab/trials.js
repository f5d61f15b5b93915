/* A table of trials, patched cell by cell: chosen by click or arrow keys, sorted by a click on a heading, filtered by
 * words and bounds such as `topk lr<0.01 bytes<2M front`, all of which must hold. `onChange` stands in changes.js. */

const FACTORS = { "": 1, k: 1e3, m: 1e6, g: 1e9, ms: 1e-3, s: 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, "%": 0.01 };
const COMPARE = {
  "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b,
};

const MARKED = 1; // the column of states

function markOf(text) {
  return Object.assign(document.createElement("span"), { className: "ss-mark", textContent: text });
}

function number(text) {
  const found = /^([-+.\d]+(?:e[-+]?\d+)?)([a-z%]*)$/i.exec(text);
  return found ? Number(found[1]) * (FACTORS[found[2].toLowerCase()] ?? NaN) : NaN;
}

/** Whether a row matches one filter term, in which a column is named by its heading without spaces. */
function meets(row, term, header) {
  const bound = /^(.+?)(<=|>=|<|>|=)(.+)$/.exec(term);
  const plain = (text) => text.toLowerCase().replace(/[ _]/g, "");
  const column = bound ? header.findIndex((name) => plain(name) === plain(bound[1])) : -1;
  if (column < 0) return [...row.cells, row.mark ?? ""].some((cell) => cell.toLowerCase().includes(term.toLowerCase()));
  const key = row.keys[column];
  if (key === null || key === undefined) return false;
  if (typeof key === "number") return COMPARE[bound[2]](key, number(bound[3]));
  return bound[2] === "=" && [key, row.cells[column]].some((text) => text.toLowerCase() === bound[3].toLowerCase());
}

function render({ model, el }) {
  const bar = document.createElement("div");
  const query = document.createElement("input");
  const told = document.createElement("span");
  const scroll = document.createElement("div");
  const table = document.createElement("table");
  bar.className = "ss-filter";
  query.type = "search";
  query.placeholder = "Filter, such as: front  lr<0.01  bytes<2M";
  query.setAttribute("aria-label", "Filter trials by words, or by bounds on columns such as lr<0.01");
  query.value = model.get("query");
  told.setAttribute("role", "status");
  bar.append(query, told);
  scroll.className = "ss-trials";
  scroll.append(table);
  table.className = "ss-plan-table ss-trial-table";
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", "Trials");
  const head = table.createTHead().insertRow();
  const body = table.createTBody();
  const known = new Map();
  const start = { column: "trial 0", way: -1 };
  let sorted = start;
  el.append(bar, scroll);

  const look = (column) => (model.get("texts").includes(column) ? "text" : "");

  /** Names of the columns; columns come and go in mid-study, so none is known by its place. */
  const columns = () => {
    const header = model.get("header");
    return header.map((name, place) => `${name} ${header.slice(0, place).filter((other) => other === name).length}`);
  };

  const makeHead = (place) => {
    const cell = document.createElement("th");
    const button = document.createElement("button");
    cell.scope = "col";
    button.type = "button";
    button.addEventListener("click", () => {
      const column = columns()[place];
      sorted = { column, way: sorted.column === column ? -sorted.way : 1 };
      draw();
    });
    cell.append(button);
    return cell;
  };

  /** Give a row as many cells as there are columns; those that it has stay, and with them the keyboard's focus. */
  const fit = (row, make) => {
    const count = model.get("header").length;
    while (row.children.length < count) row.append(make(row.children.length));
    while (row.children.length > count) row.lastElementChild.remove();
    [...row.children].forEach((cell, place) => { if (cell.className !== look(place)) cell.className = look(place); });
  };

  const heads = () => {
    const names = columns();
    if (!names.includes(sorted.column)) sorted = start;
    fit(head, makeHead);
    model.get("header").forEach((name, place) => {
      const cell = head.children[place];
      const button = cell.firstElementChild;
      if (button.textContent !== name) { button.textContent = name; button.title = `Sort by ${name}`; }
      const way = names[place] !== sorted.column ? "none" : sorted.way > 0 ? "ascending" : "descending";
      if (cell.getAttribute("aria-sort") !== way) cell.setAttribute("aria-sort", way);
    });
    return names.indexOf(sorted.column);
  };

  const compare = (column) => (a, b) => {
    const [x, y] = [a.keys[column], b.keys[column]];
    if (x === y) return b.number - a.number;
    if (x === null || y === null) return x === null ? 1 : -1;
    return (x < y ? -1 : 1) * sorted.way;
  };

  const filtered = () => {
    const [rows, header] = [model.get("rows"), model.get("header")];
    const terms = model.get("query").split(/\s+/).filter(Boolean);
    const left = rows.filter((row) => terms.every((term) => meets(row, term, header)));
    const text = !rows.length ? "No trials yet." : terms.length ? `${left.length} of ${rows.length} trials` : "";
    if (told.textContent !== text) told.textContent = text;
    return left;
  };

  const choose = (number) => {
    model.set("chosen", number);
    model.save_changes();
  };

  const make = ({ number }) => {
    const row = document.createElement("tr");
    row.dataset.number = number;
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
    const rows = filtered().sort(compare(heads()));
    const chosen = model.get("chosen");
    rows.forEach((told, place) => {
      const row = known.get(told.number) ?? make(told);
      fit(row, () => document.createElement("td"));
      [...row.children].forEach((cell, place) => {
        const mark = place === MARKED && told.mark ? [" ", markOf(told.mark)] : [];
        const text = told.cells[place] ?? "";
        const whole = mark.length ? `${text} ${told.mark}` : text;
        if (cell.textContent !== whole) { cell.replaceChildren(text, ...mark); cell.title = whole; }
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

  const search = () => {
    if (query.value === model.get("query")) return;
    model.set("query", query.value);
    model.save_changes();
    draw();
  };
  const asked = () => {
    if (query.value !== model.get("query")) query.value = model.get("query");
    draw();
  };

  query.addEventListener("input", search);
  draw();
  const ends = [onChange(model, ["header", "texts", "rows", "chosen"], draw), onChange(model, ["query"], asked)];
  return () => ends.forEach((end) => end());
}

export default { render };
