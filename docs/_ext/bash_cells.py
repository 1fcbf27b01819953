"""`%%bash` of the tutorials while the site is built: output in one piece, and the first line that fails fails the cell.

IPython's own sends what a command prints as it comes, and the pieces are then joined with line breaks inside of lines.
"""

import subprocess

from IPython.core.magic import register_cell_magic


@register_cell_magic
def bash(line: str, cell: str) -> None:
    """Runs the cell by bash; what goes to standard error is shown where it was said."""
    ended = subprocess.run(
        ["bash", "-e", "-c", cell], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(ended.stdout, end="")
    ended.check_returncode()
