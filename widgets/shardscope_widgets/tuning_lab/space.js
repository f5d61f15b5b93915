/* Rows of settings. A checkbox switches a setting on; two drop-down lists (a range) or buttons (choices) narrow it.
 * `onChange` stands in changes.js. */

function render({ model, el }) {
  el.classList.add("ss-space");
  const rows = new Map();
  const rank = Math.random().toString(36).slice(2);

  const state = () => structuredClone(model.get("state"));
  const save = (name, change) => {
    const next = state();
    next[name] = { ...next[name], ...change };
    model.set("state", next);
    model.save_changes();
  };

  const build = () => {
    rows.clear();
    el.replaceChildren(...model.get("rows").map(make));
    show();
  };

  const make = (row, place) => {
    const box = document.createElement("div");
    const head = document.createElement("label");
    const tick = document.createElement("input");
    const body = document.createElement("div");
    box.className = `ss-space-row${row.inner ? " inner" : ""}`;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", row.label);
    tick.type = "checkbox";
    tick.title = model.get("fixed") ? "" : "Search this setting";
    tick.addEventListener("change", () => save(row.name, { on: tick.checked }));
    head.append(tick, row.label);
    head.title = row.name;
    if (model.get("fixed")) tick.hidden = true;
    body.className = "ss-space-body";
    body.append(...(row.kind === "choices" ? chips(row) : ends(row, `${rank}-${place}`)));
    box.append(head, body);
    rows.set(row.name, { box, tick, body, row });
    return box;
  };

  const chips = (row) => row.options.map((text, place) => {
    const chip = document.createElement("button");
    chip.type = "button";
    chip.textContent = text;
    chip.addEventListener("click", () => {
      const picked = state()[row.name].picked;
      save(row.name, { picked: picked.includes(place) ? picked.filter((p) => p !== place) : [...picked, place] });
    });
    return chip;
  });

  const ends = (row) => ["from", "to"].flatMap((word, end) => {
    const list = document.createElement("select");
    list.setAttribute("aria-label", `${row.label}, ${word}`);
    list.append(...row.options.map((text, place) => new Option(text, place)));
    list.addEventListener("change", () => {
      const picked = [...state()[row.name].picked];
      picked[end] = Number(list.value);
      save(row.name, { picked });
    });
    return end ? [Object.assign(document.createElement("span"), { textContent: "to" }), list] : [list];
  });

  const show = () => {
    const now = model.get("state");
    const hidden = new Set(model.get("hidden"));
    const locked = model.get("locked");
    for (const [name, { box, tick, body, row }] of rows) {
      const own = now[name];
      if (!own) continue;
      box.hidden = hidden.has(name);
      tick.checked = own.on;
      tick.disabled = locked;
      body.hidden = !own.on && !model.get("fixed");
      [...body.children].forEach((part, place) => {
        if (part.tagName === "BUTTON") part.setAttribute("aria-pressed", String(own.picked.includes(place)));
        part.disabled = locked;
      });
      if (row.kind !== "choices") body.querySelectorAll("select").forEach((list, end) => { list.value = own.picked[end]; });
    }
  };

  build();
  const stops = [onChange(model, ["rows"], build), onChange(model, ["state", "hidden", "locked"], show)];
  return () => stops.forEach((stop) => stop());
}

export default { render };
