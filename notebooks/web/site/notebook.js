/* A notebook's page: draws its figures, each when it comes into view. */

import { themed } from "./theme.js";

const CONFIG = { displaylogo: false, responsive: true };
/** Plotly, loaded once there is a figure to draw. */
const library = () => import("./vendor/plotly.min.js").then(() => window.Plotly);

async function draw(place) {
  const { data, layout } = JSON.parse(place.querySelector("script").textContent);
  const Plotly = await library();
  place.replaceChildren();
  Plotly.newPlot(place, data, { ...layout, autosize: true, width: undefined }, CONFIG);
}

themed(document.querySelector("#theme"));
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) {
      seen.unobserve(target);
      draw(target);
    }
  }
}, { rootMargin: "400px" });
document.querySelectorAll(".figure").forEach((place) => seen.observe(place));
