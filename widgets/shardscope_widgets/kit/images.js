/* Settings of figures, with buttons that save them as PNG and as SVG; a part of Plotly's script, which all share. */

/** Return Plotly's settings for a figure, whose images are named after the panel, what it shows, and the figure. */
export function figureConfig(Plotly, model, el) {
  const fileName = () => {
    const panel = el.closest(".ss-lab");
    const title = panel?.querySelector(".ss-title b")?.textContent ?? "shardscope";
    const subject = panel?.querySelector("[data-subject]")?.dataset.subject;
    const words = [title, subject, model.get("label")].filter(Boolean).join(" ");
    return words.toLowerCase().replace(/[^a-z0-9.]+/g, "-").replace(/^-|-$/g, "").slice(0, 100);
  };
  const button = (format, icon, scale) => ({
    name: format,
    title: `Save as ${format.toUpperCase()}`,
    icon: Plotly.Icons[icon],
    click: (plot) => {
      const { width, height } = plot.getBoundingClientRect();
      Plotly.downloadImage(plot, { format, scale, width, height, filename: fileName() });
    },
  });
  return {
    displaylogo: false,
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
    modeBarButtonsToAdd: [button("png", "camera", 2), button("svg", "disk", 1)],
  };
}
