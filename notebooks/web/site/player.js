/* The panel that plays predicted training steps: a choice of steps, and a frame with the page of the chosen one. */

/** Fill `place` with the players of `steps`, which are titles and file names. */
export function showSteps(place, steps) {
  const choice = document.createElement("div");
  choice.className = "choice";
  choice.setAttribute("role", "group");
  choice.setAttribute("aria-label", "Strategy");
  const about = document.createElement("p");
  about.textContent = "One training step of a small GPT on four ranks, each on a node of its own, as predicted.";
  const frame = document.createElement("iframe");
  frame.title = "One training step";
  frame.addEventListener("load", () => {
    const page = frame.contentDocument.body;
    new ResizeObserver(() => { frame.style.height = `${page.scrollHeight + 24}px`; }).observe(page);
  });
  for (const { title, file } of steps) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title;
    button.addEventListener("click", () => {
      for (const other of choice.children) other.setAttribute("aria-pressed", String(other === button));
      frame.src = `steps/${file}`;
    });
    choice.append(button);
  }
  place.append(choice, about, frame);
  choice.firstChild.click();
}
