"""The console: pages over the store, for people who would rather look than read JSON (DESIGN section 2). No torch."""
