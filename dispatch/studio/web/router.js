// The address is the view: the group and page stand in the path, everything else that shapes a view in the query.
import { reactive } from "vue";
import { S } from "./store.js";

export const R = reactive({ page: "overview", id: "", query: {} });

const PAGES = ["pools", "inflight", "requests", "history", "endpoints", "gateways", "changes", "config", "system"];

function read() {
  const path = decodeURI(location.pathname.slice(S.prefix.length));
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const query = Object.fromEntries(new URLSearchParams(location.search));
  if (parts[0] === "g") {
    R.page = PAGES.includes(parts[2]) ? parts[2] : "overview";
    R.id = parts[3] || "";
  } else {
    R.page = parts[0] || "groups";
    R.id = "";
  }
  R.query = query;
}

export function begin() {
  read();
  window.addEventListener("popstate", read);
}

export function href(page, id = "", query = {}) {
  const found = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null));
  const tail = found.size ? "?" + found : "";
  if (page === "signals") return `${S.prefix}/signals${tail}`;
  const group = `${S.prefix}/g/${encodeURIComponent(S.group)}`;
  return group + (page === "overview" ? "" : `/${page}`) + (id ? `/${encodeURIComponent(id)}` : "") + tail;
}

export function go(page, id = "", query = {}) {
  history.pushState(null, "", href(page, id, query));
  read();
  window.scrollTo(0, 0);
  requestAnimationFrame(() => document.querySelector("h1")?.focus({ preventScroll: true }));
}

// Change the query of this view. Opening something pushes, so that Back closes it; anything else replaces.
export function setQuery(changes, { push = false } = {}) {
  const query = { ...R.query, ...changes };
  for (const [key, value] of Object.entries(query)) if (value === "" || value == null) delete query[key];
  const url = href(R.page, R.id, query);
  if (push) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
  R.query = query;
}

// Links are links: they can be copied and opened in another tab; an ordinary click stays in this page.
export function onLink(event) {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const url = new URL(link.href, location.href);
  const own = `${S.prefix}/g/${encodeURIComponent(S.group)}`;
  const inside = url.pathname === own || url.pathname.startsWith(own + "/") || url.pathname === `${S.prefix}/signals`;
  if (url.origin !== location.origin || link.target || !inside || !S.group) return;
  event.preventDefault();
  history.pushState(null, "", url.pathname + url.search + url.hash);
  read();
  if (url.hash) document.getElementById(url.hash.slice(1))?.scrollIntoView();
  else window.scrollTo(0, 0);
}
