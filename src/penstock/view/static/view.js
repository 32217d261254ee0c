"use strict";
// Keys, page sizes that fit the window, and parts of a page that are fetched again. Everything works without it.

const main = document.querySelector("main");

function follow(rel) {
  const found = document.querySelector(`nav.pages a[rel="${rel}"]`);
  if (found) found.click();
}

function gridColumns(cards) {
  const top = cards[0].offsetTop;
  const inRow = cards.findIndex((card) => card.offsetTop !== top);
  return inRow === -1 ? cards.length : inRow;
}

function moveInGrid(key, active) {
  const cards = [...document.querySelectorAll(".grid .card")];
  const links = cards.map((card) => card.querySelector("a"));
  const at = links.indexOf(active);
  if (at === -1) return false;
  const columns = gridColumns(cards);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[key];
  const target = step && links[at + step];
  if (target) target.focus();
  return Boolean(step);
}

document.addEventListener("keydown", (event) => {
  const active = document.activeElement;
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA|AUDIO)$/.test(active.tagName)) {
    if (event.key === "Escape") active.blur();
    return;
  }
  const keys = document.getElementById("keys");
  if (event.key.startsWith("Arrow") && moveInGrid(event.key, active)) event.preventDefault();
  else if (event.key === "ArrowRight" || event.key === "j") follow("next");
  else if (event.key === "ArrowLeft" || event.key === "k") follow("prev");
  else if (event.key === "u") follow("up");
  else if (event.key === "g") {
    const first = document.querySelector(".grid .card a");
    if (first) first.focus();
  } else if (event.key === "?") keys.classList.toggle("open");
  else if (event.key === "/") {
    const search = document.getElementById("search");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  }
});

// As many samples on a page as fit, if the address does not say how many.
const grid = document.getElementById("grid");
if (grid && location.pathname === "/samples" && !new URLSearchParams(location.search).has("n")) {
  const cards = [...grid.querySelectorAll(".card")];
  if (cards.length) {
    const columns = gridColumns(cards);
    const below = window.innerHeight - grid.getBoundingClientRect().top - 56;
    const rows = Math.max(1, Math.floor(below / (cards[0].offsetHeight + 12)));
    const fits = Math.min(200, Math.max(columns * rows, 4));
    for (const form of document.querySelectorAll("form.control input[name=n]")) form.value = fits;
    if (fits !== 40 && cards.length === 40) {
      const address = new URLSearchParams(location.search);
      address.set("n", fits);
      location.replace(`/samples?${address}`);
    }
  }
}

// A run or a background task: fetch the part again while the page is visible.
async function refresh(part) {
  if (!document.hidden) {
    try {
      const response = await fetch(part.dataset.live, { credentials: "same-origin" });
      if (response.ok) {
        const parsed = new DOMParser().parseFromString(await response.text(), "text/html");
        const open = [...part.querySelectorAll("details")].map((details) => details.open);
        const fresh = part === main ? parsed.body : parsed.body.firstElementChild;
        const done = part !== main && !fresh.dataset.live;
        part.replaceChildren(...fresh.childNodes);
        [...part.querySelectorAll("details")].forEach((details, at) => (details.open = open[at] || details.open));
        if (done) {
          location.reload();
          return;
        }
      }
    } catch (error) {
      // The server has stopped; the page stays as it is.
    }
  }
  setTimeout(() => refresh(part), part === main ? 2000 : 500);
}
for (const part of document.querySelectorAll("[data-live]")) setTimeout(() => refresh(part), part === main ? 2000 : 500);
