import { useEffect, useRef, useState, type RefObject } from 'react';

// Whether an element is in sight, or soon will be.
export function useSeen(ref: RefObject<HTMLElement | null>): boolean {
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(
      (found) => setSeen(found.at(-1)!.isIntersecting), { rootMargin: '300px' });
    observer.observe(ref.current!);
    return () => observer.disconnect();
  }, [ref]);
  return seen;
}

// The size of an element, as it is laid out.
export function useSize(): [RefObject<HTMLElement | null>, { width: number; height: number }] {
  const ref = useRef<HTMLElement>(null);
  const [size, setSize] = useState({ width: 0, height: 0 });
  useEffect(() => {
    const element = ref.current;
    if (!element) {
      return;
    }
    const observer = new ResizeObserver(() => {
      const { clientWidth: width, clientHeight: height } = element;
      setSize((before) => (before.width === width && before.height === height ? before : { width, height }));
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, size];
}
