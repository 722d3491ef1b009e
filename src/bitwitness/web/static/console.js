// What a page does beyond its text: live refresh, colours, copying, telling what is pointed at. Every page says everything without it.
"use strict";
(() => {
  const root = document.documentElement;
  const live = () => document.getElementById("live");

  // Colours ------------------------------------------------------------------------------------------------------------
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const recoloured = () => document.dispatchEvent(new CustomEvent("bitwitness:recoloured"));
  document.getElementById("theme")?.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("bitwitness-theme", root.dataset.theme); } catch { /* kept for this page only */ }
    recoloured();
  });
  dark.addEventListener("change", recoloured);

  // Copying ------------------------------------------------------------------------------------------------------------
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button.copy");
    if (!button) return;
    let done = "copied";
    try { await navigator.clipboard.writeText(button.dataset.copy); } catch {
      const range = document.createRange();   // without a secure address there is no clipboard: select it, so that Ctrl+C does
      range.selectNodeContents(button.previousElementSibling);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      done = "selected";
    }
    button.textContent = done;
    say(done === "copied" ? "Copied." : "Selected; copy it with your keyboard.");
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });

  // Telling what is pointed at -------------------------------------------------------------------------------------------
  const figure = (node) => node.closest(".ledger, .chart");
  const titleOf = (node) => node.querySelector(":scope > title")?.textContent ?? "";
  const tell = (node, politely) => {
    const place = figure(node)?.querySelector("[data-told]");
    const text = titleOf(node);
    if (!place || !text) return;
    place.setAttribute("aria-live", politely ? "polite" : "off");
    place.textContent = text;
  };
  for (const kind of ["mouseover", "focusin"]) {
    document.addEventListener(kind, (event) => {
      const node = event.target.closest?.(".cells rect.cell, .lane rect.cell, .flag a, .flag g");
      if (node) tell(node, false);
    });
  }
  document.addEventListener("keydown", (event) => {
    const map = event.target.closest?.("[data-map]");
    const keys = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!map || !keys[event.key]) return;
    event.preventDefault();
    const cells = [...map.querySelectorAll("rect.cell")];
    if (!cells.length) return;
    const [across, down] = keys[event.key];
    const at = map.querySelector(".here");
    const middle = (cell) => (Number(cell.dataset.first) + Number(cell.dataset.last)) / 2;
    const row = (cell) => Number(cell.getAttribute("y"));
    let next = cells[0];
    if (at && across) {
      const same = cells.filter((cell) => row(cell) === row(at));
      next = same[same.indexOf(at) + across] ?? at;
    } else if (at) {
      const rows = [...new Set(cells.map(row))].sort((one, other) => one - other);
      const wanted = rows[rows.indexOf(row(at)) + down];
      const there = cells.filter((cell) => row(cell) === wanted);
      next = there.sort((one, other) => Math.abs(middle(one) - middle(at)) - Math.abs(middle(other) - middle(at)))[0] ?? at;
    }
    at?.classList.remove("here");
    next.classList.add("here");
    tell(next, true);
  });

  // Times --------------------------------------------------------------------------------------------------------------
  const ago = () => {
    for (const time of document.querySelectorAll("time[datetime]")) {
      const place = time.querySelector(".ago");
      const past = (Date.now() - Date.parse(time.dateTime)) / 1000;
      if (!place || !Number.isFinite(past)) continue;
      const unit = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => Math.abs(past) >= size);
      const text = unit ? `${Math.floor(Math.abs(past) / unit[0])} ${unit[1]}` : "";
      place.textContent = !text ? "just now" : past < 0 ? `in ${text}` : `${text} ago`;
    }
  };
  setInterval(ago, 30000);

  // Live ---------------------------------------------------------------------------------------------------------------
  const said = document.getElementById("said");
  const say = (text) => { if (said && said.textContent !== text) said.textContent = text; };
  const sign = document.getElementById("live-state");
  const show = (on, word) => {
    if (!sign) return;
    sign.dataset.state = on ? "on" : "off";
    sign.querySelector(".word").textContent = word;
  };
  let pending = false, last = 0, timer = 0;
  const typing = () => live()?.contains(document.activeElement) && document.activeElement.matches("input, textarea, select");
  const refresh = () => {
    clearTimeout(timer);
    if (!live()?.hasAttribute("hx-get")) return;
    if (document.hidden || typing()) { pending = true; return; }
    const wait = 2000 - (Date.now() - last);   // a job that writes all the time must not have the page redrawn all the time
    if (wait > 0) { timer = setTimeout(refresh, wait); return; }
    pending = false;
    last = Date.now();
    window.htmx?.trigger(document.body, "bitwitness:changed");
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden && pending) refresh(); });
  document.addEventListener("focusout", () => { if (pending) setTimeout(refresh, 50); });

  const address = document.body.dataset.events;
  if (address && live()?.hasAttribute("hx-get") && window.EventSource) {
    let since = new URL(address, location.href);
    const connect = () => {
      const stream = new EventSource(since);
      stream.addEventListener("open", () => show(true, "live"));
      stream.addEventListener("changed", (event) => {
        const number = Number.parseInt(event.data, 10);
        if (Number.isFinite(number)) since.searchParams.set("since", String(number));
        refresh();
      });
      stream.addEventListener("error", () => {
        // The server ends a stream by itself after a while; only one that does not come back is worth a word.
        if (stream.readyState === EventSource.CLOSED) { show(false, "not live"); setTimeout(connect, 10000); refresh(); }
        else setTimeout(() => { if (stream.readyState !== EventSource.OPEN) show(false, "reconnecting"); }, 5000);
      });
      addEventListener("pagehide", () => stream.close(), { once: true });
    };
    connect();
  } else if (sign) sign.dataset.state = "none";

  // A refresh must not be noticed by who reads: what is open, focused or scrolled stays so.
  const keyOf = (node) => node.getAttribute("href") ?? node.getAttribute("aria-label") ?? node.dataset.copy ?? node.textContent.slice(0, 80);
  const alike = (node) => [...live().querySelectorAll(node.tagName)].filter((other) => keyOf(other) === keyOf(node));
  let kept = null;
  const keep = () => {
    const part = live();
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    const anchor = [...part.querySelectorAll("h1[id], h2[id], h3[id], li[id]")].find((node) => node.getBoundingClientRect().bottom > 0);
    kept = {
      details: new Map([...part.querySelectorAll("details[id]")].map((node) => [node.id, node.open])),
      scrolls: [...part.querySelectorAll(".scroll, pre")].map((node) => [keyOf(node), node.scrollLeft]).filter(([, left]) => left > 0),
      focus: focused && { id: focused.id, tag: focused.tagName, key: keyOf(focused), nth: alike(focused).indexOf(focused) },
      anchor: anchor && { id: anchor.id, top: anchor.getBoundingClientRect().top },
      heading: part.querySelector("h1")?.textContent.trim() ?? "",
    };
  };
  const restore = () => {
    const part = live();
    if (!part || !kept) return;
    for (const [id, open] of kept.details) { const node = document.getElementById(id); if (node) node.open = open; }
    for (const [key, left] of kept.scrolls) {
      const node = [...part.querySelectorAll(".scroll, pre")].find((other) => keyOf(other) === key);
      if (node) node.scrollLeft = left;
    }
    const { focus, anchor, heading } = kept;
    if (focus) {
      const node = (focus.id && document.getElementById(focus.id))
        || [...part.querySelectorAll(focus.tag)].filter((other) => keyOf(other) === focus.key)[focus.nth]
        || document.getElementById("main");
      if (node !== document.activeElement) node.focus({ preventScroll: true });
    }
    const moved = anchor && document.getElementById(anchor.id);
    if (moved) scrollBy({ top: moved.getBoundingClientRect().top - anchor.top, behavior: "instant" });
    const now = part.querySelector("h1")?.textContent.trim() ?? "";
    if (now && now !== heading) say(`Changed: ${now}`);
    kept = null;
  };
  // Whose session has ended must not take what was shown before for what is now. A refresh that succeeds again replaces the notice.
  const ended = () => {
    show(false, "signed out");
    const place = document.getElementById("notices");
    if (!place || document.getElementById("signed-out")) return;
    const notice = document.createElement("p");
    notice.id = "signed-out";
    notice.className = "notice notice-error";
    notice.setAttribute("role", "alert");
    const way = document.createElement("a");
    way.href = document.body.dataset.login;
    way.textContent = "Sign in";
    notice.append("Your session has ended: this page is not refreshed any more, and shows what was before. ", way, " to go on.");
    place.append(notice);
  };
  document.body.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.target?.id !== "live") return;
    if (event.detail.xhr.status === 401) {
      event.detail.shouldSwap = false;
      ended();
      return;
    }
    if (!event.detail.xhr.responseText.includes('id="live"')) {   // e.g. signed out: let the browser show what there is now
      event.detail.shouldSwap = false;
      if (event.detail.xhr.status < 500) location.reload();
      return;
    }
    keep();
  });
  document.body.addEventListener("htmx:afterSwap", () => {
    document.dispatchEvent(new CustomEvent("bitwitness:redrawn"));
    restore();
  });
  for (const kind of ["htmx:sendError", "htmx:responseError"]) {
    document.body.addEventListener(kind, (event) => { if (event.detail.xhr?.status !== 401) show(false, "not live"); });
  }
})();
