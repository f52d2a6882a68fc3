// Fills the menu of versions from `policylossVersions`, which versions.js beside the folders of
// all versions defines. A page that stands alone keeps the one entry it has.
const versionMenu = document.getElementById("versions");
if (versionMenu && window.policylossVersions) {
  const current = versionMenu.value;
  versionMenu.replaceChildren(
    ...window.policylossVersions.map((name) => new Option(name, name, false, name === current)),
  );
  versionMenu.addEventListener("change", () => {
    location.href = `${versionMenu.dataset.root}/${versionMenu.value}/index.html`;
  });
}
