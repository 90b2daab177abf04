// Shows the current page in the list of pages, lets wide blocks scroll by keyboard and wide pictures in a box of their own.
document.addEventListener("DOMContentLoaded", () => {
  const pages = document.querySelector(".sidebar-scroll");
  const current = document.querySelector(".sidebar-tree .current-page");
  if (pages && current) {
    const below = current.getBoundingClientRect().top - pages.getBoundingClientRect().top;
    pages.scrollTop += below - pages.clientHeight / 2;
  }
  for (const block of document.querySelectorAll("div.highlight pre, .table-wrapper")) block.tabIndex = 0;
  for (const image of document.querySelectorAll("article img")) {
    const box = document.createElement("div");
    box.className = "picture";
    image.replaceWith(box);
    box.append(image);
  }
});
