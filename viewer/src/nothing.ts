// Stands for a module that no panel reaches.
export default {};
