// Runs before anything is drawn, so that a page never flashes in the wrong colours. Whoever has chosen none gets the system's.
"use strict";
document.documentElement.classList.add("js");
try {
  const chosen = localStorage.getItem("bitwitness-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* no storage: the system's colours */ }
