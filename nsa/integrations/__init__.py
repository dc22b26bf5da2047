"""NSA inside other frameworks. Nothing here is imported by `import nsa`; each module names the extra that it needs."""
