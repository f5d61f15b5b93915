/** Call `act` once after an update of any of the named traits, when all traits of the update are set. An error in `act`
 * is reported, and cannot keep the model from taking the rest of the update. Return what ends this. */
function onChange(model, names, act) {
  let isDue = false;
  const later = () => {
    if (isDue) return;
    isDue = true;
    queueMicrotask(() => { isDue = false; act(); });
  };
  const events = names.map((name) => `change:${name}`).join(" ");
  model.on(events, later);
  return () => model.off(events, later);
}
