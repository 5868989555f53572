"""Result lines as pages: Markdown tables, and one self-contained HTML page with plots (``moe-layer report``).

:mod:`.pieces` is what a page consists of, :mod:`.a2a`, :mod:`.layer`, :mod:`.gemm`, :mod:`.quant` and :mod:`.resources`
make it from lines, :mod:`.markdown`, :mod:`.html` and :mod:`.plots` render it, :mod:`.page` is the command.
"""
