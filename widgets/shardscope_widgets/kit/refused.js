/* Says below a box that what was typed into it is not used: ipywidgets moves a number into its bounds without a word, and
 * a value that the kernel rejects is undone. `attendTo` in access.js calls `watchBoxes`. */

const BOX = 'input[type="number"], input[type="text"]';
const WAIT = { each: 100, most: 50 }; // the kernel answers within 5 seconds, or its answer no longer has to do with this

/** What to say about `typed`; empty while the box shows it. */
function refusal(box, typed, before) {
  const now = box.value;
  const isNumber = box.type === "number";
  if (isNumber ? Number(now) === Number(typed) && typed : now === typed || now !== before) return "";
  const control = box.closest(".jupyter-widgets");
  const label = control.querySelector(".widget-label")?.textContent.trim() || "This";
  const about = [box, control, ...control.querySelectorAll("[title]")].map((el) => el.title).find(Boolean);
  const kept = now || box.placeholder;
  if (isNumber && !typed) return `${label} needs a number; it is still ${kept}.`;
  const rest = now === before ? `it is still ${kept}` : `${kept}, the nearest possible value, is used`;
  return `${label} cannot be ${typed}; ${rest}.${now === before && about ? ` ${about}` : ""}`;
}

/** Watch the boxes of a panel; return what ends that. */
function watchBoxes(panel) {
  let due = 0;
  let note = null;
  const starts = new WeakMap();
  const forget = () => { clearInterval(due); note?.remove(); note = null; };
  const entered = ({ target: box }) => { if (box.matches?.(BOX)) starts.set(box, box.value); };
  const changed = ({ target: box }) => {
    forget();
    if (!box.matches?.(BOX)) return;
    const [typed, before] = [box.value, starts.get(box) ?? box.value];
    starts.set(box, typed); // what the next entry replaces, if this watch ends before it knows better
    let left = WAIT.most;
    due = setInterval(() => {
      const text = refusal(box, typed, before);
      if (!text && (left -= 1) > 0) return;
      clearInterval(due);
      starts.set(box, box.value);
      if (!text) return;
      note = Object.assign(document.createElement("div"), { className: "ss-note bad ss-refused", textContent: text });
      note.setAttribute("role", "alert");
      box.closest(".jupyter-widgets").after(note);
    }, WAIT.each);
  };
  const pressed = ({ target }) => { if (target.closest?.("button")) forget(); }; // it may set the box, too
  const listeners = { focusin: entered, input: forget, change: changed, click: pressed };
  for (const [name, listen] of Object.entries(listeners)) panel.addEventListener(name, listen, true);
  return () => {
    forget();
    for (const [name, listen] of Object.entries(listeners)) panel.removeEventListener(name, listen, true);
  };
}
