/* The page: one panel a widget, created when it is first shown. The widgets run in the worker.
   A picture of the panel, which is part of the page, covers it until it has drawn its figure. */

import { loadFrontEnd, loadPlotly } from "./front_end.js";
import { Manager } from "./manager.js";
import { showSteps } from "./player.js";
import { themed } from "./theme.js";

const PANELS = [
  { id: "memory", widget: "MemoryCalculator", title: "Memory", asks: "Will it fit?" },
  { id: "communication", widget: "CommunicationCalculator", title: "Communication", asks: "How long is an all-reduce?" },
  { id: "pipeline", widget: "PipelineExplorer", title: "Pipeline", asks: "How large is the bubble?" },
  { id: "planner", widget: "Planner", title: "Planner", asks: "Which layout is fastest?" },
  { id: "step", title: "Watch one step", asks: "Who sends what, and when?" },
];

const about = fetch("./about.json").then((answer) => answer.json());
const find = (selector) => document.querySelector(selector);
const places = new Map(); // by panel: the element that shows it
const opening = new Map(); // by name of the widget: what to call with its model
let isReady = false; // whether Python has started

function say(text, kind = "") {
  find("#status").textContent = text;
  find("#status").className = kind;
  if (kind === "failed") document.querySelectorAll(".picture .ss-left").forEach((left) => { left.textContent = ""; });
}

/** The panel and the settings in the address: `#planner?nodes=16&device="h100-80gb"`. */
function asked() {
  const [id, query] = location.hash.slice(1).split("?");
  const settings = Object.fromEntries([...new URLSearchParams(query ?? "")].map(([name, text]) => {
    try {
      return [name, JSON.parse(text)];
    } catch {
      return [name, text];
    }
  }));
  return { panel: PANELS.find((each) => each.id === id) ?? PANELS[0], settings };
}

/** The address of a panel with settings; the panels' “Copy link” asks for it. */
window.shardscopeLink = (name, settings) => {
  const query = new URLSearchParams(Object.entries(settings).map(([field, value]) => [field, JSON.stringify(value)]));
  return `${location.href.split("#")[0]}#${PANELS.find(({ widget }) => widget === name).id}?${query}`;
};

function drawLinks() {
  for (const { id, title, asks } of PANELS) {
    const link = document.createElement("a");
    link.href = `#${id}`;
    link.innerHTML = "<b></b><span></span>";
    [link.firstChild.textContent, link.lastChild.textContent] = [title, asks];
    find("#panels").append(link);
  }
}

function create(worker, manager, { id, widget, title }, settings) {
  const place = document.createElement("section");
  place.id = `panel-${id}`;
  place.setAttribute("aria-label", title);
  find("#shown").append(place);
  places.set(id, place);
  if (!widget) {
    about.then(({ steps }) => showSteps(place, steps));
    return;
  }
  const isUsual = !isReady && Object.keys(settings).length === 0;
  uncover(place, find(`.picture[data-panel="${id}"]`));
  const recorded = isUsual ? showRecorded(manager, widget, place, id).catch((error) => console.warn(error)) : null;
  opening.set(widget, async (model) => {
    const shown = await recorded;
    manager.forget(shown?.messages ?? []);
    await manager.turn;
    if (shown?.model !== model || manager.isOutdated) {
      place.replaceChildren();
      await manager.show(model, place);
      performance.mark(`shown-${id}`);
    }
    performance.mark(`live-${id}`);
    say("");
  });
  worker.postMessage({ open: widget, settings });
}

/** Remove the picture of a panel when the panel itself has drawn a figure below it. */
function uncover(place, picture) {
  const watch = new MutationObserver(() => {
    if (!place.querySelector(".js-plotly-plot .main-svg")) return;
    watch.disconnect();
    picture?.remove();
  });
  watch.observe(place, { childList: true, subtree: true });
}

/** Show a panel as it was when the page was built, until the worker has opened it; return its model and messages. */
async function showRecorded(manager, widget, place, id) {
  const record = await (await fetch(`./recorded/${widget}.json`)).json();
  manager.restore(record.messages);
  await manager.show(record.model, place);
  performance.mark(`shown-${id}`);
  return record;
}

function show(worker, manager) {
  const { panel, settings } = asked();
  for (const link of find("#panels").children) {
    link.toggleAttribute("aria-current", link.hash === `#${panel.id}`);
  }
  if (!places.has(panel.id)) create(worker, manager, panel, settings);
  else if (Object.keys(settings).length) location.reload(); // an open panel keeps its own settings
  for (const [id, place] of places) place.hidden = id !== panel.id;
  const isShown = ({ dataset }) => dataset.panel === panel.id && Object.keys(settings).length === 0;
  for (const picture of document.querySelectorAll(".picture")) picture.hidden = !isShown(picture);
  find("#status").hidden = !panel.widget; // only widgets wait for Python
}

function drawFooter({ versions, notebooks }) {
  find("#versions").textContent = versions;
  for (const { title, file } of notebooks) {
    const link = document.createElement("a");
    [link.href, link.textContent] = [`notebooks/${file}`, title];
    const item = document.createElement("li");
    item.append(link);
    find("#notebooks ul").append(item);
  }
  find("#notebooks").hidden = notebooks.length === 0;
}

async function start() {
  themed(find("#theme"));
  drawLinks();
  const worker = new Worker("./worker.js", { type: "module" });
  const hear = {
    step: ({ step }) => say(`${step} …`, "busy"),
    failed: ({ failed }) => say(failed, "failed"),
    ready: () => { isReady = true; },
  };
  worker.onmessage = ({ data }) => Object.keys(data).forEach((kind) => hear[kind]?.(data));
  loadPlotly();
  worker.onerror = (error) => say(`The page cannot start: ${error.message}`, "failed");
  about.then(drawFooter);
  const manager = new Manager(worker, await loadFrontEnd());
  hear.comm = (data) => manager.take(data);
  hear.done = ({ done }) => manager.done(done);
  hear.opened = ({ opened, model }) => opening.get(opened)(model);
  window.onhashchange = () => show(worker, manager);
  show(worker, manager);
}

start().catch((error) => say(`The page cannot start: ${error.message}`, "failed"));
