// Fills the menus of versions from `policylossVersions`, which versions.js next to the folders of
// all versions defines. On a page that stands alone, a menu keeps the one entry it has.
for (const menu of window.policylossVersions ? document.querySelectorAll(".versions") : []) {
  const current = menu.value;
  menu.replaceChildren(
    ...window.policylossVersions.map((name) => new Option(name, name, false, name === current)),
  );
  menu.addEventListener("change", () => {
    location.href = `${menu.dataset.root}/${menu.value}/index.html`;
  });
}
