// Inflate Plotly and the figures, and draw each figure when it comes near the view, is opened, or is printed.
(async () => {
  const inflate = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const places = [...document.querySelectorAll(".plot")];
  const [code, figures] = await Promise.all([inflate("plotly"), inflate("figures").then(JSON.parse)]);
  const script = document.createElement("script");
  script.textContent = code;
  document.head.append(script);

  const isNarrow = () => innerWidth < 600;
  const settings = { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  const draw = (place) => {
    if (place.dataset.drawn || place.closest("details:not([open])")) return;
    place.dataset.drawn = "yes";
    const { data, layout } = figures[place.dataset.figure];
    const small = isNarrow() ? { dragmode: false, font: { ...layout.font, size: 11 } } : {};
    Plotly.newPlot(place, data, { ...layout, ...small }, { ...settings, displayModeBar: isNarrow() ? false : "hover" });
  };

  const watcher = new IntersectionObserver(
    (seen) => seen.filter((one) => one.isIntersecting).forEach((one) => draw(one.target)), { rootMargin: "400px" });
  places.forEach((place) => watcher.observe(place));
  const idle = window.requestIdleCallback ?? ((then) => setTimeout(then, 30));
  const drawRest = ([next, ...rest]) => { if (next) { draw(next); idle(() => drawRest(rest)); } };
  idle(() => drawRest(places));
  document.querySelectorAll("details").forEach((one) =>
    one.addEventListener("toggle", () => one.querySelectorAll(".plot").forEach(draw)));

  const drawn = () => places.filter((place) => place.dataset.drawn);
  addEventListener("beforeprint", () => {
    places.forEach(draw);
    drawn().forEach((place) => Plotly.relayout(place, { width: 660 }));
  });
  addEventListener("afterprint", () => drawn().forEach((place) => Plotly.relayout(place, { width: null, autosize: true })));

  // A link may point into a closed part of the page.
  const openTarget = () => document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details")
    ?.setAttribute("open", "");
  addEventListener("hashchange", openTarget);
  openTarget();
})();
