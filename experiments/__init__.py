"""Studies: one module per question. Each runs populations, and writes data, a table, a figure and a verdict."""
