// Names in tables break behind their underscores, dots and slashes, so that a column is no wider than their parts.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("table.docutils td code.literal")) {
    const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) found.push(texts.currentNode);
    for (const text of found) {
      const parts = text.data.split(/(?<=[_./])/);
      text.replaceWith(...parts.flatMap((part, number) => (number ? [document.createElement("wbr"), part] : [part])));
    }
  }
});
