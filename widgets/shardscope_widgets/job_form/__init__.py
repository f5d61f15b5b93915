"""The form of a job, as the labs show it.

choices     the inputs as traits, which `kit.form` makes from the fields of a job
families    the strategies and compressors to choose from, by family
controls    the widgets bound to the traits, with `picker` for long lists and `options` for a method's settings
"""
