"""What all widgets share.

form          traits made from the fields of specs, and of choices beside them
controls      the controls of a form's traits, bound to them
frame         the heading, and the style sheet of all widgets
guard         error handling: errors of callbacks are shown, one callback at a time
clock         a thread that calls a method a few times a second
live_figure   a Plotly figure that survives a reload of the page; `click_figure` reports the clicked point
swatch        legend samples of lines and bars
"""
