/* The light and the dark theme: the system's choice, or the reader's, kept for the next visit. */

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (localStorage.shardscopeTheme ?? (dark.matches ? "dark" : "light")) === "dark";

function draw(button) {
  document.documentElement.classList.toggle("dark", isDark());
  document.body.dataset.jpThemeLight = String(!isDark());
  button.textContent = isDark() ? "Light theme" : "Dark theme";
}

/** Draw the page in its theme, and let the button switch it. */
export function themed(button) {
  button.addEventListener("click", () => {
    localStorage.shardscopeTheme = isDark() ? "light" : "dark";
    draw(button);
  });
  dark.addEventListener("change", () => draw(button));
  draw(button);
}
