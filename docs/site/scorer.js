// How the search ranks what it finds: Sphinx's own numbers; a title with every word that is asked for above, decision records and
// the list of files below all other pages.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const behind = docname.startsWith("decisions/") || ["onboarding", "changelog"].includes(docname);
    const first = docname.startsWith("how-to/") || docname.startsWith("tutorial/");
    const words = title.toLowerCase().split(/[^a-z0-9]+/);
    const asked = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/[^a-z0-9]+/).filter(Boolean);
    const named = asked.length && asked.every((word) => words.includes(word));
    return score + (behind ? -50 : first ? 5 : 0) + (named ? 20 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
