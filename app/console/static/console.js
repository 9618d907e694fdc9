// What moves: one stream per browser tells every tab that something changed; htmx fetches what is shown again. And keys.
// Everything works without this file.
"use strict";
(() => {
  const stale = document.getElementById("stale");
  const address = document.body.dataset.stream;
  const typing = () => document.activeElement && /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);

  // --- the stream: over HTTP/1.1 a browser has six connections to a host, so the tabs of a browser share one
  const channel = "BroadcastChannel" in window ? new BroadcastChannel("ratchet") : null;
  let last = "";
  const tell = (what) => {
    if (what.kind === "changed" && what.id !== last) {
      last = what.id;
      if (stale) stale.hidden = true;
      document.body.dispatchEvent(new CustomEvent("ratchet:changed", { bubbles: true }));
    }
    if (what.kind === "lost" && stale) stale.hidden = false;
    if (what.kind === "found" && stale) stale.hidden = true;
    if (what.kind === "ended") location.reload();
  };
  const lead = () => new Promise((done) => {
    const say = (what) => { tell(what); if (channel) channel.postMessage(what); };
    const source = new EventSource(address);
    source.addEventListener("changed", (event) => say({ kind: "changed", id: event.lastEventId }));
    source.addEventListener("ended", () => { source.close(); say({ kind: "ended" }); done(); });
    source.onopen = () => say({ kind: "found" });
    source.onerror = () => say({ kind: "lost" });
  });
  if (address && "EventSource" in window) {
    if (channel) channel.onmessage = (event) => tell(event.data);
    if (navigator.locks) navigator.locks.request("ratchet-stream", lead);
    else lead();
  }

  // --- keys; `a` and `r b` only go somewhere, nothing is done by a key alone
  const off = document.getElementById("keys-off");
  const kept = "ratchet-keys-off";
  const go = (link) => { if (link) link.click(); };
  const links = () => [...document.querySelectorAll("main a[href]")];
  const step = (by) => {
    const all = links();
    const at = all.indexOf(document.activeElement);
    const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by))];
    if (next) next.focus();
  };
  let before = "";
  let forget = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing() || (off && off.checked)) return;
    const pair = before + event.key;
    before = "";
    clearTimeout(forget);
    if (pair === "rb") { event.preventDefault(); return go(document.getElementById("roll-back")); }
    if (pair.length === 2 && pair[0] === "g") { event.preventDefault(); return go(document.querySelector(`nav a[data-key="${CSS.escape(pair[1])}"]`)); }
    switch (event.key) {
      case "g": case "r": before = event.key; forget = setTimeout(() => { before = ""; }, 1500); break;
      case "/": event.preventDefault(); document.getElementById("find")?.focus(); break;
      case "j": step(1); break;
      case "k": step(-1); break;
      case "a": document.querySelector("[data-act]")?.focus(); break;
      case "?": document.getElementById("keys")?.showModal(); break;
    }
  });
  try {
    if (off) {
      off.checked = localStorage.getItem(kept) === "1";
      off.addEventListener("change", () => localStorage.setItem(kept, off.checked ? "1" : "0"));
    }
  } catch { /* a browser that keeps nothing: single keys stay on */ }
})();
