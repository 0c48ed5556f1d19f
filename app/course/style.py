"""The few rules of style that lesson pages add to Streamlit's own."""

from __future__ import annotations

from app.figures.palette import Theme


def style(theme: Theme) -> str:
    """A style element for lesson pages in a theme's colours."""
    return f"<style>:root {{ --lesson-paper: {theme.paper}; --lesson-line: {theme.line}; }}{_RULES}</style>"


_RULES = """
.stApp, .stApp header.stAppHeader { background-color: var(--lesson-paper); }
.stColumn:has(> .stVerticalBlock .st-key-lesson-picture) {
  position: sticky; top: 4rem; align-self: flex-start; max-height: calc(100vh - 5rem); overflow-y: auto;
}
.st-key-course-map .stPageLink a { padding-left: 0; }
.st-key-course-map .stPageLink p { font-weight: 600; font-size: 1rem; }
.st-key-next-lesson .stPageLink a { border: 2px solid currentColor; border-radius: 0.5rem; padding: 0.4rem 1rem; }
.st-key-next-lesson .stPageLink p { font-weight: 600; }
.lesson-tables table { width: 100%; border-collapse: collapse; font-size: 0.95rem; margin: 0; }
.lesson-tables :is(th, td) { text-align: left; padding: 0.2rem 0.5rem; border-bottom: 1px solid var(--lesson-line); }
.lesson-tables td { font-variant-numeric: tabular-nums; }
.lesson-tables p { margin: 0.5rem 0 0 0; }
.lesson-tokens ol { display: flex; flex-wrap: wrap; gap: 0.3rem; list-style: none; padding: 0; margin: 0; }
.lesson-tokens li { border: 1px solid var(--lesson-line); border-radius: 0.3rem; padding: 0.1rem 0.35rem; margin: 0; }
.lesson-tokens li.now { outline: 2px solid currentColor; }
.lesson-tokens li span { display: block; font-family: monospace; white-space: pre; }
.lesson-tokens li small { font-size: 0.75rem; }
.lesson-tokens p { margin: 0 0 0.4rem 0; overflow-wrap: anywhere; }
.lesson-compare { width: 100%; border-collapse: collapse; margin: 0 0 0.25rem 0; }
.lesson-compare th { font-weight: 400; font-size: 0.85rem; }
.lesson-compare :is(th, td) { text-align: left; padding: 0.1rem 0.75rem 0.1rem 0; vertical-align: top; border: 0; }
.lesson-compare td { font-weight: 600; }
.stApp dl.lesson-words { columns: 20rem; margin: 0; padding: 0; }
.lesson-words div { break-inside: avoid; }
.lesson-words dt { font-weight: 600; scroll-margin-top: 5rem; margin: 0; padding: 0; }
.lesson-words dd { margin: 0 0 0.4rem 1rem; }
.lesson-words dt:target { outline: 2px solid currentColor; outline-offset: 2px; }
@media (max-width: 640px) {
  .stColumn:has(> .stVerticalBlock .st-key-lesson-picture) {
    order: -1; top: 3.5rem; max-height: 42vh; z-index: 3; background-color: var(--lesson-paper);
    border-bottom: 1px solid var(--lesson-line); padding-bottom: 0.25rem;
  }
  .stApp:has(.st-key-lesson-picture) .stMain { scroll-padding-top: 48vh; }
}
"""
