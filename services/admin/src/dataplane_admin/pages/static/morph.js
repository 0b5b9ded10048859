// Updates a part of the page to a newly rendered one and keeps its nodes, and with them focus, scroll
// positions, typed text and open details.

// Attributes that scripts or the user change; an element's data-keep lists further ones.
const OWNED = new Set(["tabindex", "open"]);

export function morph(old, fresh) {
  syncAttributes(old, fresh);
  if (old.hasAttribute("data-keep-children")) return;
  const keyed = new Map();
  for (const child of old.children) {
    const key = keyOf(child);
    if (key) keyed.set(key, child);
  }
  let place = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const match = find(place, wanted, keyed);
    if (match) {
      // Moving a node would lose the focus, so the nodes before it are removed instead.
      if (match !== place) {
        if (keyed.has(keyOf(wanted)) && precedes(place, match)) {
          while (place !== match) place = removed(place);
        } else {
          old.insertBefore(match, place);
        }
      }
      if (match.nodeType === Node.ELEMENT_NODE) morph(match, wanted);
      else if (match.nodeValue !== wanted.nodeValue) match.nodeValue = wanted.nodeValue;
      place = match.nextSibling;
    } else {
      old.insertBefore(added(wanted), place);
    }
  }
  while (place) place = removed(place);
}

// Returns a copy to insert. A checked radio button in it would uncheck the one that the user chose.
function added(wanted) {
  const node = document.importNode(wanted, true);
  for (const button of node.querySelectorAll?.("input[type=radio][checked]") || []) {
    if (document.querySelector(`input[type=radio][name="${CSS.escape(button.name)}"]:checked`)) button.checked = false;
  }
  return node;
}

function find(place, wanted, keyed) {
  const key = keyOf(wanted);
  if (key) {
    const match = keyed.get(key);
    return match && match.parentNode && match.nodeName === wanted.nodeName ? match : null;
  }
  for (let node = place; node; node = node.nextSibling) {
    if (keyOf(node)) return null;
    if (node.nodeName === wanted.nodeName) return node;
    if (node.nodeType === Node.ELEMENT_NODE) return null;
  }
  return null;
}

function precedes(place, match) {
  return Boolean(place && place.compareDocumentPosition(match) & Node.DOCUMENT_POSITION_FOLLOWING);
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.getAttribute("data-key") : null;
}

function syncAttributes(old, fresh) {
  const kept = (old.getAttribute("data-keep") || "").split(" ");
  const own = (name) => OWNED.has(name) || kept.includes(name);
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !own(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (!own(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}
