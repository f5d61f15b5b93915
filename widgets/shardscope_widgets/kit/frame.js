/* A lab's title, and a banner that says when its kernel is gone.

ipywidgets marks the views of a kernel that has been restarted or has died with a class. In a page that has been reloaded
this mark can be missed, so the status of the kernel is watched too. The lab then no longer shows the state of anything,
so its other parts are made inert. */

const GONE = "jupyter-widgets-disconnected";
const LOST = ["restarting", "autorestarting", "dead"];

function render({ model, el }) {
  el.innerHTML = '<div class="ss-title"><b role="heading" aria-level="2"></b><span></span><div hidden aria-live="polite">'
    + '<button type="button">Copy code</button><button type="button" hidden>Copy link</button></div></div>'
    + '<div class="ss-banner" role="alert" hidden></div>';
  const [title, about] = el.querySelectorAll("b, span");
  title.textContent = model.get("title");
  const tell = () => { about.textContent = model.get("about"); };
  model.on("change:about", tell);
  tell();
  const share = el.querySelector(".ss-title div");
  const [code, link] = share.children;
  const offer = () => {
    share.hidden = !model.get("panel");
    link.hidden = !window.shardscopeLink; // the web page has addresses for settings
  };
  const offerText = (button, text) => {
    const label = button.textContent;
    let timer;
    const say = (said) => {
      clearTimeout(timer);
      button.textContent = said;
      timer = setTimeout(() => { button.textContent = label; }, 1500);
    };
    button.addEventListener("click", () => copy(text()).then(() => say("Copied"), () => say("No clipboard")));
  };
  offerText(code, () => model.get("code")); // `copy` is in copy.js
  offerText(link, () => window.shardscopeLink(model.get("panel"), model.get("settings")));
  model.on("change:panel", offer);
  offer();
  const name = () => { el.dataset.subject = model.get("subject"); }; // read by live_figure.js
  model.on("change:subject", name);
  name();
  const banner = el.querySelector(".ss-banner");
  const own = el.closest(`.${GONE}, .jupyter-widgets`) ?? el;

  let isLost = false;

  const look = () => {
    const isGone = isLost || own.classList.contains(GONE);
    banner.hidden = !isGone;
    banner.textContent = isGone ? model.get("gone") : "";
    const lab = el.closest(".ss-lab");
    for (const part of lab?.children ?? []) {
      if (!part.contains(el)) part.inert = isGone;
    }
    lab?.classList.toggle("ss-gone", isGone);
  };
  const watch = new MutationObserver(look);
  watch.observe(own, { attributes: true, attributeFilter: ["class"] });
  const kernel = model.widget_manager?.kernel;
  const listen = (_kernel, status) => {
    isLost ||= LOST.includes(status);
    look();
  };
  kernel?.statusChanged?.connect(listen);
  look();
  const end = attend(el); // in access.js
  return () => { model.off("change:about", tell); model.off("change:panel", offer); model.off("change:subject", name); watch.disconnect(); kernel?.statusChanged?.disconnect(listen); end(); };
}

export default { render };
