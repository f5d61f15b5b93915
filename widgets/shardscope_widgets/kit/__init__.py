"""Parts shared by all widgets.

form          traits generated from the fields of specs, and traits for other inputs
controls      controls for the traits of a form, synchronised with them
markup        lines of text, headings, tables and columns, as HTML and as boxes
drawer        inputs folded away behind a button
frame         the heading, with the style sheet of all widgets
guard         error handling: runs one callback at a time and shows its errors
clock         a thread that calls a method a few times a second
live_figure   a Plotly figure that survives a reload of the page; `click_figure` reports the clicked point
swatch        legend samples of lines and bars
"""
